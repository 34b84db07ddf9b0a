"""mlc-q4f16_1: MLC-LLM's four bits a weight, without calibration, and a library compiled for the model's shape."""


def mlc_flags(wildcards):
    """Return the interpreter of MLC-LLM, if there is one."""
    return {"mlc-llm-python": INTERPRETERS["mlc_llm"]} if "mlc_llm" in INTERPRETERS else {}


FORMATS["mlc-q4f16_1"] = Format(
    layout="mlc",
    engine="quantmill-tvm",
    env="mlc",
    program="build.mlc",
    config="mlc",
    parameters={"quantization": "q4f16_1"},
    source="safetensors",
    gpu=False,
    threads=1,
    inputs=lambda wc: {"library": f"artifacts/{wc.model}/mlc/model_lib.so"},
    flags=mlc_flags,
    logs=("mlc-library",),
    priority=1,
    # groups of 32, embeddings too; a library of 0.4 to 1.1 MB
    resources=BuildResources(Size(9 / 16, files=500_000), cpu=Memory(90), cuda=Memory(255), time=Time(2, ns=4)),
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
        mem_mb=lambda wc, attempt: attempt * jobs.job_mb(320 if STUDY["device"] == "cpu" else 1000),
    params:
        program=program("mlc.compile"),
        python=python("mlc"),
        device=lambda wc: STUDY["device"],
    shell:
        "{params.python:q} {params.program.command:q} {input.source:q} {output:q} --device {params.device:q}"
        " --cache artifacts/libraries 2> {log:q}"
