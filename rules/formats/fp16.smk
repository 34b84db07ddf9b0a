"""fp16: the unquantized reference, run by transformers."""

FORMATS["fp16"] = Format(env="torch", engine="transformers")


rule fp16:
    input:
        env=environment("tools"),
        source="artifacts/{model}/safetensors",
    output:
        directory("artifacts/{model}/fp16"),
    log:
        "artifacts/logs/{model}/fp16.log",
    resources:
        mem_mb=job_mb(memory.STREAMING),
        disk_mb=lambda wc, input: disk.artifact_mb("fp16", shape.of_folder(lying(input.source))),
        runtime=build_minutes,
    params:
        program=program("build_fp16.py"),
        python=python("tools"),
    shell:
        "{params.python:q} {params.program[0]} {input.source} {output} 2> {log}"
