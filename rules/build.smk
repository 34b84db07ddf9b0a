"""The one rule that builds artifacts: each format names its program, inputs and flags."""


def of_artifact(wildcards):
    """Return the registered format of the artifact that a job builds."""
    return FORMATS[format_of(wildcards.artifact)]


def artifact_texts(wildcards):
    """Return the calibration text, and the evaluation text that it must differ from."""
    kinds = ("calibration", "evaluation") if of_artifact(wildcards).calibrated else ()
    return {kind: f"artifacts/{wildcards.model}/tokens/{kind}.json" for kind in kinds}


def artifact_inputs(wildcards):
    """Return a build's inputs, by the names of its program's flags, with its environments and the gate's."""
    format = of_artifact(wildcards)
    envs = dict.fromkeys((format.env, ENGINES[format.engine].env))
    more = artifact_texts(wildcards) | (format.inputs(wildcards) if format.inputs else {})
    return {
        "source": f"artifacts/{wildcards.model}/{format.source}",
        "env": [file for env in envs for file in environment(env)],
        "gate": gate_input(wildcards),
        **{name: path for name, path in more.items() if path},
    }


def build_gpus(artifact):
    """Return the GPUs of the program that builds a format or variant."""
    return FORMATS[format_of(artifact)].gpus(STUDY["quantizers"]["gpus"])


def gpu_options(artifact):
    """Return the flags by which a program chooses what it keeps on the GPU, if it has a choice."""
    resources = FORMATS[format_of(artifact)].resources
    if not (resources and resources.placements):
        return {}
    words = {"gpus": build_gpus(artifact), "gpu-memory-gb": STUDY["quantizers"].get("gpu_memory_gb")}
    return {name: value for name, value in words.items() if value not in (None, 1)}


def artifact_options(wildcards, input):
    """Return the program's flags from the format and the config."""
    format = of_artifact(wildcards)
    given = parameters(wildcards.artifact) | format.parameters
    options = {"format": wildcards.artifact, "layout": format.layout, "engine": format.engine}
    options |= {"seed": STUDY["seed"], "device": STUDY["device"]}
    options |= {"engine-python": python(ENGINES[format.engine].env), "parameters": json.dumps(given, sort_keys=True)}
    options |= STUDY["calibration"] if format.calibrated else {}
    options |= gpu_options(wildcards.artifact)
    options |= format.flags(wildcards) if format.flags else {}
    options |= {name: path for name, path in input.items() if name not in ("source", "env", "gate")}
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def artifact_priority(wildcards):
    """Return a build's priority: cheap ones come first, which completes rows early (Snakefile)."""
    format = of_artifact(wildcards)
    return (0 if format.calibrated else 10) if format.priority is None else format.priority


# A killed build restarts from scratch. Only gptqmodel's GPTQ (of Llama and Qwen3-MoE) and EXL3 resume: their progress is
# next to the artifact, in .ARTIFACT.resume-… (docs/FOOTGUNS.md).
rule artifact:
    input:
        unpack(artifact_inputs),
    output:
        directory("artifacts/{model}/{artifact}"),
    log:
        "artifacts/logs/{model}/{artifact}.log",
    wildcard_constraints:
        artifact=artifact_pattern(*FORMATS),
    priority: artifact_priority
    threads: lambda wc: of_artifact(wc).threads
    resources:
        **request(plan_build, disk=True),
        gpu=lambda wc: build_gpus(wc.artifact) if of_artifact(wc).gpu else gate_gpus(wc),
    params:
        program=lambda wc: program(of_artifact(wc).program),
        python=lambda wc: python(of_artifact(wc).env),
        options=artifact_options,
        gate=lambda wc: gate_options(wc, of_artifact(wc).gate_env),
    shell:
        "{params.python:q} {params.program.command:q} {input.source:q} {output:q} --threads {threads} {params.options:q}"
        " {params.gate:q} > {log:q} 2>&1"
