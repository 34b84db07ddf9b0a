"""CTranslate2: ct2-int8, ct2-float16 and ct2-float32, one converter with three quantizations."""

CT2_QUANTIZATIONS = {f"ct2-{name}": name for name in ("int8", "float16", "float32")}

for name in CT2_QUANTIZATIONS:
    FORMATS[name] = Format(layout="ct2", engine="ctranslate2", env="torch")


rule ct2:
    input:
        env=environment("torch"),
        source="artifacts/{model}/safetensors",
        gate=gate_input,
    output:
        directory("artifacts/{model}/{format}"),
    log:
        "artifacts/logs/{model}/{format}.log",
    wildcard_constraints:
        format=names(*CT2_QUANTIZATIONS),
    priority: 10
    resources:
        gpu=gate_gpus,
        mem_mb=build_memory,
        disk_mb=build_disk,
        runtime=build_minutes,
    params:
        program=program("build_ct2.py"),
        python=python("torch"),
        quantization=lambda wc: CT2_QUANTIZATIONS[wc.format],
        device=lambda wc: STUDY["device"],
        gate=gate_options,
    shell:
        "{params.python:q} {params.program[0]} {input.source} {output} --quantization {params.quantization}"
        " --device {params.device} {params.gate:q} 2> {log}"
