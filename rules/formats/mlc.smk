"""mlc-q4f16_1: MLC-LLM's four bits a weight, not calibrated; with a library that is compiled for the model's shape."""

FORMATS["mlc-q4f16_1"] = Format(
    layout="mlc",
    engine="quantmill-tvm",
    env="mlc",
    logs=("mlc-library",),
    # groups of 32, embeddings too; a library of 0.4 to 1.1 MB
    resources=BuildResources(Size(9 / 16, files=500_000), cpu=Memory(74), cuda=Memory(255)),
)


rule mlc_library:
    input:
        env=environment("mlc"),
        source="artifacts/{model}/safetensors",
    output:
        "artifacts/{model}/mlc/model_lib.so",
    log:
        "artifacts/logs/{model}/mlc-library.log",
    priority: 1
    resources:
        gpu=1,  # compiled for the one that is there
        mem_mb=lambda wc: jobs.job_mb(320 if STUDY["device"] == "cpu" else 1000),
    params:
        program=program("mlc.compile"),
        python=python("mlc"),
        device=lambda wc: STUDY["device"],
    shell:
        "{params.python:q} {params.program.command:q} {input.source:q} {output:q} --device {params.device:q}"
        " --cache artifacts/libraries 2> {log:q}"


rule mlc:
    input:
        env=environment("mlc"),
        source="artifacts/{model}/safetensors",
        library=rules.mlc_library.output,
        gate=gate_input,
    output:
        directory("artifacts/{model}/{artifact}"),
    log:
        "artifacts/logs/{model}/{artifact}.log",
    wildcard_constraints:
        artifact=artifact_pattern("mlc-q4f16_1"),
    priority: 1
    resources:
        gpu=gate_gpus,
        mem_mb=build_memory,
        disk_mb=build_disk,
        runtime=build_minutes,
    params:
        program=program("build.mlc"),
        python=python("mlc"),
        device=lambda wc: STUDY["device"],
        tool=lambda wc: [
            f"--tool={STUDY['mlc']['tool']}",
            *([f"--mlc-llm-python={INTERPRETERS['mlc_llm']}"] if "mlc_llm" in INTERPRETERS else []),
        ],
        gate=gate_options,
    shell:
        "{params.python:q} {params.program.command:q} {input.source:q} {output:q} --library {input.library:q}"
        " --device {params.device:q} {params.tool:q} {params.gate:q} 2> {log:q}"
