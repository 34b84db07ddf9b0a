"""CTranslate2: ct2-int8, ct2-float16 and ct2-float32, one converter with three quantizations."""

CT2_QUANTIZATIONS = ["int8", "float16", "float32"]

for quantization in CT2_QUANTIZATIONS:
    FORMATS[f"ct2-{quantization}"] = Format(env="torch", engine="ctranslate2")


rule ct2:
    input:
        program=program("build_ct2.py"),
        env=environment("torch"),
        source="artifacts/{model}/safetensors",
    output:
        directory("artifacts/{model}/ct2-{quantization}"),
    log:
        "artifacts/logs/{model}/ct2-{quantization}.log",
    wildcard_constraints:
        quantization="|".join(CT2_QUANTIZATIONS),
    params:
        python=python("torch"),
    shell:
        "{params.python:q} {input.program[0]} {input.source} {output} --quantization {wildcards.quantization} 2> {log}"
