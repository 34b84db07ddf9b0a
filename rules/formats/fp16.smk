"""fp16: the unquantized reference, run by transformers."""

COPYING = Memory(jobs.STREAMING)
FORMATS["fp16"] = Format(
    layout="hf",
    engine="transformers",
    env="tools",
    resources=BuildResources(Size(2), COPYING, COPYING, quantized=False),
)


rule fp16:
    input:
        env=environment("tools"),
        source="artifacts/{model}/safetensors",
        gate=gate_input,
    output:
        directory("artifacts/{model}/{artifact}"),
    log:
        "artifacts/logs/{model}/{artifact}.log",
    wildcard_constraints:
        artifact=artifact_pattern("fp16"),
    priority: 20
    resources:
        gpu=gate_gpus,
        mem_mb=build_memory,
        disk_mb=build_disk,
        runtime=build_minutes,
    params:
        program=program("build.fp16"),
        python=python("tools"),
        device=lambda wc: STUDY["device"],
        gate=gate_options,
    shell:
        "{params.python:q} {params.program.command:q} {input.source:q} {output:q} --share --device {params.device:q}"
        " {params.gate:q} 2> {log:q}"
