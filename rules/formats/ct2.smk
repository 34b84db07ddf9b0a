"""CTranslate2: ct2-int8, ct2-float16 and ct2-float32, one converter with three quantizations."""

CT2_QUANTIZATIONS = {f"ct2-{name}": name for name in ("int8", "float16", "float32")}
CT2_FLOATS = ("ct2-float16", "ct2-float32")  # take about as long


def ct2_costs(size, like=(), **grown):
    """What the converter takes, with torch and transformers."""
    return BuildResources(size, Memory(430 + CUDA_BUILD, **grown), Memory(935, **grown), quantized=not like, like=like)


CT2_COSTS = {
    "ct2-int8": ct2_costs(Size(1, row=4), weights=2.7, tables=4),  # a table is quantized in float32
    "ct2-float16": ct2_costs(Size(2), CT2_FLOATS, weights=2.7),
    "ct2-float32": ct2_costs(Size(4), CT2_FLOATS, weights=6.2),
}

for name in CT2_QUANTIZATIONS:
    FORMATS[name] = Format(layout="ct2", engine="ctranslate2", env="torch", resources=CT2_COSTS[name])


rule ct2:
    input:
        env=environment("torch"),
        source="artifacts/{model}/safetensors",
        gate=gate_input,
    output:
        directory("artifacts/{model}/{artifact}"),
    log:
        "artifacts/logs/{model}/{artifact}.log",
    wildcard_constraints:
        artifact=artifact_pattern(*CT2_QUANTIZATIONS),
    priority: 10
    resources:
        gpu=gate_gpus,
        mem_mb=build_memory,
        disk_mb=build_disk,
        runtime=build_minutes,
    params:
        program=program("build.ct2"),
        python=python("torch"),
        quantization=lambda wc: CT2_QUANTIZATIONS[wc.artifact],
        device=lambda wc: STUDY["device"],
        gate=gate_options,
    shell:
        "{params.python:q} {params.program.command:q} {input.source:q} {output:q} --quantization {params.quantization:q}"
        " --device {params.device:q} {params.gate:q} 2> {log:q}"
