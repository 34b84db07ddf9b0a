"""Latency and quality: one program each for all formats and engines."""

REFERENCE_ENGINE = FORMATS[format_of(STUDY["reference"])].engine
# The last arguments of every program that scores
SCORING = (
    " --protocol {params.protocol:q} --evaluation {input.evaluation:q} --device {params.device:q} --threads {threads}"
    + (" --stream" if STUDY["stream"] else "")
    + " 2> {log:q}"
)


def plan_scoring(wildcards, input):
    """Plan a job that scores a text, which has at most as many positions as its file can hold ids."""
    each = cell(wildcards)
    positions = local_path(input.evaluation).stat().st_size // jobs.BYTES_AN_ID
    return study_jobs().score(each.artifact, each.engine, shape_of_model(wildcards, input.artifact), positions)


def plan_expected(wildcards, input):
    """Plan the predictions of a model's source by transformers."""
    return study_jobs().expect(shape_of_model(wildcards, input.source))


def plan_latency(wildcards, input):
    """Plan a latency job."""
    each = cell(wildcards)
    prompts = len(json.loads(local_path(input.prompts).read_text())["prompts"])
    return study_jobs().latency(each.artifact, each.engine, shape_of_model(wildcards, input.artifact), prompts)


rule latency:
    input:
        env=lambda wc: environment(ENGINES[cell(wc).engine].env),
        artifact=lambda wc: f"artifacts/{wc.model}/{cell(wc).artifact}",
        prompts="artifacts/{model}/tokens/prompts.json",
        evaluation="artifacts/{model}/tokens/evaluation.json",
    output:
        "artifacts/{model}/latency/{cell}.json",
    log:
        "artifacts/logs/{model}/latency-{cell}.log",
    priority: lambda wc: 100 + (cell(wc).artifact == STUDY["reference"])
    # More than any machine has. Snakemake lowers it to --cores, so that nothing else runs during a measurement. A
    # cluster's profile sets the number with set-threads.
    threads: 1024
    resources:
        **request(plan_latency),
        gpu=lambda wc: cell(wc).gpus,
    params:
        run=lambda wc: cell_runner("latency.measure", wc),
        device=STUDY["device"],
        latency=json.dumps(STUDY["latency"], sort_keys=True),
    shell:
        "{params.run[python]:q} {params.run[program]:q} {input.artifact:q} {output:q} {params.run[arguments]:q}"
        " --prompts {input.prompts:q} --evaluation {input.evaluation:q} --latency {params.latency:q}"
        " --device {params.device:q} --threads {threads} 2> {log:q}"


rule expected_predictions:
    input:
        env=environment("torch"),
        source="artifacts/{model}/source",
        safetensors="artifacts/{model}/safetensors",  # our bounded reader has validated the weights before transformers
        evaluation="artifacts/{model}/tokens/evaluation.json",
    output:
        "artifacts/{model}/expected.json",
    log:
        "artifacts/logs/{model}/expected-predictions.log",
    priority: 1000
    threads: 8
    resources:
        **request(plan_expected),
        gpu=1,
    params:
        program=program("gate.expected").command,  # no hash: another way to score must not rebuild artifacts
        python=python("torch"),
        device=STUDY["device"],
        protocol=STUDY["perplexity"],
    shell:
        "{params.python:q} {params.program:q} {input.source:q} {output:q}" + SCORING


REFERENCE = f"artifacts/{{model}}/quality/{STUDY['reference']}-predictions"


def scoring_options(wildcards, input):
    """Return the flags for the reference's predictions, and for what the engine is checked with, if it is."""
    checked = [f"--expected={input.expected}"] if "expected" in input.keys() else ["--noise-floor"]
    return [f"--reference={input.reference}", *checked]


rule quality:
    input:
        env=lambda wc: environment(ENGINES[cell(wc).engine].env),
        artifact=lambda wc: f"artifacts/{wc.model}/{cell(wc).artifact}",
        evaluation="artifacts/{model}/tokens/evaluation.json",
        reference=REFERENCE,
        expected=rules.expected_predictions.output[0],
    output:
        "artifacts/{model}/quality/{cell}.json",
        "artifacts/{model}/quality/{cell}.npz",
    log:
        "artifacts/logs/{model}/quality-{cell}.log",
    wildcard_constraints:
        cell=rf"(?!(?:noise-floor|{re.escape(STUDY['reference'])})\.(?:json|npz)$)[a-z0-9][a-z0-9._@-]*",
    priority: 1000
    threads: 8
    resources:
        **request(plan_scoring),
        gpu=lambda wc: cell(wc).gpus,
    params:
        run=lambda wc: cell_runner("quality.measure", wc),
        device=STUDY["device"],
        protocol=STUDY["perplexity"],
        scored=scoring_options,
    shell:
        "{params.run[python]:q} {params.run[program]:q} {input.artifact:q} {output[0]:q} {params.run[arguments]:q}"
        " {params.scored:q}" + SCORING


# The forward passes that give the reference's row write its predictions too.
use rule quality as reference with:
    input:
        env=environment(ENGINES[REFERENCE_ENGINE].env),
        artifact=f"artifacts/{{model}}/{STUDY['reference']}",
        evaluation="artifacts/{model}/tokens/evaluation.json",
        expected=rules.expected_predictions.output[0],
    output:
        f"artifacts/{{model}}/quality/{STUDY['reference']}.json",
        f"artifacts/{{model}}/quality/{STUDY['reference']}.npz",
        predictions=intermediate(directory(REFERENCE)),
    log:
        f"artifacts/logs/{{model}}/quality-{STUDY['reference']}.log",
    params:
        run=runner("quality.measure", REFERENCE_ENGINE),
        scored=lambda wc, input, output: [
            f"--write-reference={output.predictions}",
            f"--keep={STUDY['reference_logits']}",
            f"--expected={input.expected}",
        ],


use rule quality as noise_floor with:
    input:
        env=environment(ENGINES[REFERENCE_ENGINE].env),
        artifact=f"artifacts/{{model}}/{STUDY['reference']}",
        evaluation="artifacts/{model}/tokens/evaluation.json",
        reference=REFERENCE,
    output:
        "artifacts/{model}/quality/noise-floor.json",
    log:
        "artifacts/logs/{model}/noise-floor.log",
    priority: 1
