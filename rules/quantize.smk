"""The job that quantizes: one rule for all formats that name their program as `quantizer`."""


def quantizer_options(wildcards):
    """What the format and the config say to a tool, as its program's flags."""
    format = FORMATS[format_of(wildcards.artifact)]
    config = parameters(wildcards.artifact) | {"seed": STUDY["seed"], "format": wildcards.artifact}
    if format.calibrated:
        config |= STUDY["calibration"]
        config |= {kind: f"artifacts/{wildcards.model}/tokens/{kind}.json" for kind in ("calibration", "evaluation")}
    config["engine_python"] = python(ENGINES[format.engine].env)
    return [*format.quantizer[1:], *(f"--{key.replace('_', '-')}={value}" for key, value in config.items())]


def quantizer_texts(wildcards):
    """The texts that a format calibrates on, and that it must not share with the evaluation."""
    calibrated = FORMATS[format_of(wildcards.artifact)].calibrated
    kinds = ("calibration", "evaluation") if calibrated else ()
    return [f"artifacts/{wildcards.model}/tokens/{kind}.json" for kind in kinds]


# A job that was killed goes on: gptqmodel saves its progress after every block, of Llama and Qwen3-MoE (beside the
# artifact, in .FORMAT.resume-…). No other tool has anything of the kind: they begin anew (docs/FOOTGUNS.md).
rule quantize:
    input:
        env=lambda wc: [
            file
            for env in dict.fromkeys(
                (FORMATS[format_of(wc.artifact)].env, ENGINES[FORMATS[format_of(wc.artifact)].engine].env)
            )
            for file in environment(env)
        ],
        source="artifacts/{model}/fp16",
        texts=quantizer_texts,
        gate=gate_input,
    output:
        directory("artifacts/{model}/{artifact}"),
    log:
        "artifacts/logs/{model}/{artifact}.log",
    wildcard_constraints:
        artifact=artifact_pattern(*(name for name, format in FORMATS.items() if format.quantizer)),
    priority: lambda wc: 0 if FORMATS[format_of(wc.artifact)].calibrated else 10
    threads: 8
    resources:
        gpu=1,
        mem_mb=build_memory,
        disk_mb=build_disk,
        runtime=build_minutes,
    params:
        program=lambda wc: program(FORMATS[format_of(wc.artifact)].quantizer[0]),
        python=lambda wc: python(FORMATS[format_of(wc.artifact)].env),
        device=lambda wc: STUDY["device"],
        options=quantizer_options,
        gate=gate_options,
    shell:
        "{params.python:q} {params.program.command:q} {input.source:q} {output:q} --device {params.device:q}"
        " --threads {threads} {params.options:q} {params.gate:q} > {log:q} 2>&1"
