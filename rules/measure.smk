"""Latency and quality: one program each for all formats and engines."""


def model_shape(wildcards, input):
    """The model's shape: some artifacts have no config.json that tells it, and who has cleaned up has those alone."""
    folder = Path(f"artifacts/{wildcards.model}/safetensors")
    return shape.of_folder(folder if folder.is_dir() else Path(input.artifact))


def scoring_memory(wildcards, input):
    """MB of a job that scores a format (the reference where it names none), and of the reference's own beside it."""
    model, format = model_shape(wildcards, input), wildcards.get("format", STUDY["reference"])
    formats = [format, *([STUDY["reference"]] if STUDY["reference_logits"] == "recompute" else [])]
    return job_mb(sum(memory.engine_mb(name, model, STUDY["device"], memory.WINDOW) for name in formats))


rule latency:
    input:
        program=program("latency.py"),
        engine=lambda wc: engine_files(wc.format),
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
        mem_mb=lambda wc, input: job_mb(memory.latency_mb(wc.format, model_shape(wc, input), STUDY["device"])),
    params:
        python=lambda wc: python(FORMATS[wc.format].env),
        engine=lambda wc: FORMATS[wc.format].engine,
        device=STUDY["device"],
        new_tokens=STUDY["latency"]["new_tokens"],
        repeats=STUDY["latency"]["repeats"],
        processes=STUDY["latency"]["processes"],
        decode=STUDY["latency"]["decode"],
        prompt_tokens=STUDY["latency"]["prompt_tokens"],
        batch_sizes=STUDY["latency"]["batch_sizes"],
    shell:
        "{params.python:q} {input.program[0]} {input.artifact} {output} --engine {params.engine} --prompts {input.prompts}"
        " --device {params.device} --threads {threads} --new-tokens {params.new_tokens} --repeats {params.repeats}"
        " --processes {params.processes} --decode {params.decode} --evaluation {input.evaluation}"
        " --prompt-tokens {params.prompt_tokens} --batch-sizes {params.batch_sizes} 2> {log}"


rule reference_logits:
    input:
        program=program("reference_logits.py"),
        engine=engine_files(STUDY["reference"]),
        env=environment(FORMATS[STUDY["reference"]].env),
        artifact=f"artifacts/{{model}}/{STUDY['reference']}",
        evaluation="artifacts/{model}/tokens/evaluation.json",
    output:
        f"artifacts/{{model}}/quality/{STUDY['reference']}-logits.npy",
    log:
        "artifacts/logs/{model}/reference-logits.log",
    threads: 8
    resources:
        gpu=1,
        mem_mb=scoring_memory,
    params:
        python=python(FORMATS[STUDY["reference"]].env),
        engine=FORMATS[STUDY["reference"]].engine,
        device=STUDY["device"],
        protocol=STUDY["perplexity"],
    shell:
        "{params.python:q} {input.program[0]} {input.artifact} {output} --engine {params.engine}"
        " --protocol {params.protocol} --evaluation {input.evaluation} --device {params.device} --threads {threads} 2> {log}"


rule gate_reference:
    input:
        # scoring anew is no reason to build anew what is compared with it
        program=ancient(program("gate.py")),
        engine=ancient(engine_files(STUDY["reference"])),
        env=environment(FORMATS[STUDY["reference"]].env),
        artifact=f"artifacts/{{model}}/{STUDY['reference']}",
        evaluation="artifacts/{model}/tokens/evaluation.json",
    output:
        "artifacts/{model}/gate.json",
    log:
        "artifacts/logs/{model}/gate-reference.log",
    threads: 8
    resources:
        gpu=1,
        mem_mb=scoring_memory,
    params:
        python=python(FORMATS[STUDY["reference"]].env),
        engine=FORMATS[STUDY["reference"]].engine,
        device=STUDY["device"],
        protocol=STUDY["perplexity"],
    shell:
        "{params.python:q} {input.program[0]} {input.artifact} {output} --engine {params.engine}"
        " --protocol {params.protocol} --evaluation {input.evaluation} --device {params.device} --threads {threads} 2> {log}"


def reference_input(wildcards):
    """What the reference's predictions come from: its logits, or what computes them anew."""
    model, format = f"artifacts/{wildcards.model}", STUDY["reference"]
    if STUDY["reference_logits"] == "disk":
        return [f"{model}/quality/{format}-logits.npy"]
    env = FORMATS[format].env
    return [
        f"{model}/{format}",
        *program("reference_logits.py"),
        *engine_files(format),
        *([environment(env)] if environment(env) else []),
    ]


def reference_options(wildcards, input):
    """The same, as flags of quality.py."""
    if STUDY["reference_logits"] == "disk":
        return [f"--reference={input.reference}"]
    format = FORMATS[STUDY["reference"]]
    return [
        f"--recompute=artifacts/{wildcards.model}/{STUDY['reference']}",
        f"--recompute-engine={format.engine}",
        f"--recompute-python={python(format.env)}",
    ]


rule quality:
    input:
        program=program("quality.py"),
        engine=lambda wc: engine_files(wc.format),
        env=lambda wc: environment(FORMATS[wc.format].env),
        artifact="artifacts/{model}/{format}",
        evaluation="artifacts/{model}/tokens/evaluation.json",
        reference=reference_input,
        gate=rules.gate_reference.output[0],
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
    params:
        python=lambda wc: python(FORMATS[wc.format].env),
        engine=lambda wc: FORMATS[wc.format].engine,
        device=STUDY["device"],
        protocol=STUDY["perplexity"],
        reference=reference_options,
    shell:
        "{params.python:q} {input.program[0]} {input.artifact} {output[0]} --engine {params.engine}"
        " --protocol {params.protocol} --evaluation {input.evaluation} {params.reference:q} --gate {input.gate}"
        " --device {params.device} --threads {threads} 2> {log}"


rule noise_floor:
    input:
        program=program("quality.py"),
        engine=engine_files(STUDY["reference"]),
        env=environment(FORMATS[STUDY["reference"]].env),
        artifact=f"artifacts/{{model}}/{STUDY['reference']}",
        evaluation="artifacts/{model}/tokens/evaluation.json",
        reference=reference_input,
    output:
        "artifacts/{model}/quality/noise-floor.json",
    log:
        "artifacts/logs/{model}/noise-floor.log",
    threads: 8
    resources:
        gpu=1,
        mem_mb=scoring_memory,
    params:
        python=python(FORMATS[STUDY["reference"]].env),
        engine=FORMATS[STUDY["reference"]].engine,
        device=STUDY["device"],
        protocol=STUDY["perplexity"],
        reference=reference_options,
    shell:
        "{params.python:q} {input.program[0]} {input.artifact} {output} --engine {params.engine} --noise-floor"
        " --protocol {params.protocol} --evaluation {input.evaluation} {params.reference:q}"
        " --device {params.device} --threads {threads} 2> {log}"
