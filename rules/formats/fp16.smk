"""fp16: the unquantized reference, run by transformers."""

FORMATS["fp16"] = Format(env="torch", engine="transformers")


rule fp16:
    input:
        program=program("build_fp16.py"),
        env=environment("tools"),
        source="artifacts/{model}/safetensors",
    output:
        directory("artifacts/{model}/fp16"),
    log:
        "artifacts/logs/{model}/fp16.log",
    params:
        python=python("tools"),
    shell:
        "{params.python:q} {input.program[0]} {input.source} {output} 2> {log}"
