"""Latency and quality: one program each for all formats and engines."""


def model_shape(wildcards, input):
    """The model's shape, from whatever tells it: who has cleaned up has artifacts alone, some without a config.json."""
    folder = Path(f"artifacts/{wildcards.model}")
    names = ("safetensors", "source", *STUDY["models"][wildcards.model]["formats"])
    found = next((found for name in names if (found := shape.of_config(folder / name))), None)
    return found or shape.of_folder(lying(input.artifact))


def scoring_ask(wildcards, input):
    """What a job asks for that scores a format (the reference where it names none), and of the reference's own beside
    it; the text has no more positions than the ids that its file can hold."""
    name = wildcards.get("format", STUDY["reference"])
    positions = lying(input.evaluation).stat().st_size // jobs.BYTES_AN_ID
    return study_jobs().score(name, FORMATS[name].engine, model_shape(wildcards, input), positions)


def scoring_memory(wildcards, input):
    """MB of the same."""
    return scoring_ask(wildcards, input).mb


def scoring_minutes(wildcards, input):
    """Minutes of the same, at most."""
    return scoring_ask(wildcards, input).minutes


def expected_memory(wildcards, input):
    """MB of the job that runs a model's source by transformers."""
    return study_jobs().expect(shape.of_folder(lying(input.source))).mb


def latency_ask(wildcards, input):
    """What a latency job asks for, by how many prompts there are."""
    prompts = len(json.loads(lying(input.prompts).read_text())["prompts"])
    engine = FORMATS[wildcards.format].engine
    return study_jobs().latency(wildcards.format, engine, model_shape(wildcards, input), prompts)


def latency_memory(wildcards, input):
    """MB of the same."""
    return latency_ask(wildcards, input).mb


def latency_minutes(wildcards, input):
    """Minutes of the same, at most."""
    return latency_ask(wildcards, input).minutes


rule latency:
    input:
        env=lambda wc: environment(FORMATS[wc.format].env),
        artifact="artifacts/{model}/{format}",
        prompts="artifacts/{model}/tokens/prompts.json",
        evaluation="artifacts/{model}/tokens/evaluation.json",
    output:
        "artifacts/{model}/latency/{format}.json",
    log:
        "artifacts/logs/{model}/latency-{format}.log",
    # More than any machine has: Snakemake lowers it to --cores, so that nothing runs beside a measurement. A cluster's
    # profile says with set-threads how many a job gets.
    threads: 1024
    resources:
        gpu=1,
        mem_mb=latency_memory,
        runtime=latency_minutes,
    params:
        run=lambda wc: runner("latency.py", wc.format),
        device=STUDY["device"],
        protocol=STUDY["latency"],
    shell:
        "{params.run[python]:q} {params.run[program]} {input.artifact} {output} --engine {params.run[engine]}"
        " --prompts {input.prompts} --evaluation {input.evaluation} --device {params.device} --threads {threads}"
        " --new-tokens {params.protocol[new_tokens]} --repeats {params.protocol[repeats]}"
        " --processes {params.protocol[processes]} --decode {params.protocol[decode]}"
        " --prompt-tokens {params.protocol[prompt_tokens]} --batch-sizes {params.protocol[batch_sizes]} 2> {log}"


rule reference_logits:
    input:
        env=environment(FORMATS[STUDY["reference"]].env),
        artifact=f"artifacts/{{model}}/{STUDY['reference']}",
        evaluation="artifacts/{model}/tokens/evaluation.json",
    output:
        passing(f"artifacts/{{model}}/quality/{STUDY['reference']}-logits.npy"),
    log:
        "artifacts/logs/{model}/reference-logits.log",
    threads: 8
    resources:
        gpu=1,
        mem_mb=scoring_memory,
        runtime=scoring_minutes,
    params:
        run=runner("reference_logits.py", STUDY["reference"]),
        device=STUDY["device"],
        protocol=STUDY["perplexity"],
    shell:
        "{params.run[python]:q} {params.run[program]} {input.artifact} {output} --engine {params.run[engine]}"
        " --protocol {params.protocol} --evaluation {input.evaluation} --device {params.device} --threads {threads} 2> {log}"


rule expected_predictions:
    input:
        env=environment("torch"),
        source="artifacts/{model}/source",
        safetensors="artifacts/{model}/safetensors",  # so that our own reader has seen the weights before transformers does
        evaluation="artifacts/{model}/tokens/evaluation.json",
    output:
        "artifacts/{model}/gate.json",
    log:
        "artifacts/logs/{model}/expected-predictions.log",
    threads: 8
    resources:
        gpu=1,
        mem_mb=expected_memory,
        runtime=build_minutes,
    params:
        program=program("expected_predictions.py")[0],  # no hash: scoring anew is no reason to build anew
        python=python("torch"),
        device=STUDY["device"],
        protocol=STUDY["perplexity"],
    shell:
        "{params.python:q} {params.program} {input.source} {output} --evaluation {input.evaluation}"
        " --protocol {params.protocol} --device {params.device} --threads {threads} 2> {log}"


# What the reference's predictions come from: its logits, or what computes them anew
if STUDY["reference_logits"] == "disk":
    REFERENCE = [f"artifacts/{{model}}/quality/{STUDY['reference']}-logits.npy"]
    REFERENCE_RUN = None
    REFERENCE_OPTIONS = "--reference={input.reference}"
else:
    REFERENCE = [f"artifacts/{{model}}/{STUDY['reference']}", *environment(FORMATS[STUDY["reference"]].env)]
    REFERENCE_RUN = runner("reference_logits.py", STUDY["reference"])
    REFERENCE_OPTIONS = (
        "--recompute={input.reference[0]} --recompute-engine={params.reference[engine]}"
        " --recompute-python={params.reference[python]:q}"
    )


rule quality:
    input:
        env=lambda wc: environment(FORMATS[wc.format].env),
        artifact="artifacts/{model}/{format}",
        evaluation="artifacts/{model}/tokens/evaluation.json",
        reference=REFERENCE,
        gate=rules.expected_predictions.output[0],
    output:
        "artifacts/{model}/quality/{format}.json",
        "artifacts/{model}/quality/{format}.npz",
    log:
        "artifacts/logs/{model}/quality-{format}.log",
    wildcard_constraints:
        format=r"(?!noise-floor\b)[a-z0-9][a-z0-9._-]*",
    threads: 8
    resources:
        gpu=1,
        mem_mb=scoring_memory,
        runtime=scoring_minutes,
    params:
        run=lambda wc: runner("quality.py", wc.format),
        device=STUDY["device"],
        protocol=STUDY["perplexity"],
        reference=REFERENCE_RUN,
    shell:
        "{params.run[python]:q} {params.run[program]} {input.artifact} {output[0]} --engine {params.run[engine]}"
        " --protocol {params.protocol} --evaluation {input.evaluation} --gate {input.gate}"
        " --device {params.device} --threads {threads} " + REFERENCE_OPTIONS + " 2> {log}"


rule noise_floor:
    input:
        env=environment(FORMATS[STUDY["reference"]].env),
        artifact=f"artifacts/{{model}}/{STUDY['reference']}",
        evaluation="artifacts/{model}/tokens/evaluation.json",
        reference=REFERENCE,
    output:
        "artifacts/{model}/quality/noise-floor.json",
    log:
        "artifacts/logs/{model}/noise-floor.log",
    threads: 8
    resources:
        gpu=1,
        mem_mb=scoring_memory,
        runtime=scoring_minutes,
    params:
        run=runner("quality.py", STUDY["reference"]),
        device=STUDY["device"],
        protocol=STUDY["perplexity"],
        reference=REFERENCE_RUN,
    shell:
        "{params.run[python]:q} {params.run[program]} {input.artifact} {output} --engine {params.run[engine]} --noise-floor"
        " --protocol {params.protocol} --evaluation {input.evaluation}"
        " --device {params.device} --threads {threads} " + REFERENCE_OPTIONS + " 2> {log}"
