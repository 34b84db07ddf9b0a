"""GGUF: every type of llama.cpp by its name, converted and quantized by llama.cpp's programs."""

import shutil

GGUF_CONVERTED = {"f32": 32, "f16": 16, "bf16": 16}  # bits a weight
GGUF_QUANTIZED = {"q8_0": 8.5, "q6_k": 6.57, "q5_k_m": 5.67, "q5_k_s": 5.52, "q5_1": 6, "q5_0": 5.5}
GGUF_QUANTIZED |= {"q4_k_m": 4.83, "q4_k_s": 4.57, "q4_1": 5, "q4_0": 4.55, "iq4_nl": 4.5, "iq4_xs": 4.3}
GGUF_QUANTIZED |= {"q3_k_l": 4.22, "q3_k_m": 3.89, "q3_k_s": 3.5, "iq3_m": 3.7, "iq3_s": 3.5, "iq3_xs": 3.3}
GGUF_QUANTIZED |= {"iq3_xxs": 3.1, "q2_k": 3.16, "q2_k_s": 2.9, "iq2_m": 2.7, "iq2_s": 2.5, "iq2_xs": 2.3}
GGUF_QUANTIZED |= {"iq2_xxs": 2.1, "iq1_m": 1.75, "iq1_s": 1.56, "tq2_0": 2.1, "tq1_0": 1.7}
GGUF_WANTS_IMATRIX = ("iq3_xs", "iq3_xxs", "q2_k_s", "iq2_m", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s")
LLAMA_CPP = "artifacts/libraries/llama.cpp"
GGUF_MEMORY = Memory(700 + CUDA_BUILD)  # the converter imports torch; llama-quantize holds a tensor in float32

COMPILED["llama_cpp"] = [LLAMA_CPP]


def gguf_type(artifact):
    """Return llama.cpp's name of a format's type; for a mixture, the type of the same size, or q4_k_m."""
    if format_of(artifact) != "gguf-mixed":
        return format_of(artifact).removeprefix("gguf-")
    size = parameters(artifact)["size"]
    if isinstance(size, str) and size not in GGUF_QUANTIZED:
        refuse(f"{artifact}: unknown size {size!r}{suggestion(size, GGUF_QUANTIZED)}")
    return size if isinstance(size, str) else "q4_k_m"


def imatrix(wildcards):
    """Return the importance matrix, if the study uses it; a mixture always does. Random weights have none."""
    artifact = wildcards.artifact
    wanted = parameters(artifact).get("imatrix", True)
    if wanted and has_quality(wildcards.model):
        return f"artifacts/{wildcards.model}/imatrix"
    if format_of(artifact) == "gguf-mixed" or gguf_type(artifact) in GGUF_WANTS_IMATRIX:
        why = f"{wildcards.model} has random weights; remove it" if wanted else "set gguf.imatrix: true"
        refuse(f"{artifact}: needs an importance matrix; {why}")
    return None


def converted_inputs(wildcards):
    """Return a text and its ids, which check the converted tokenizer."""
    ids = f"artifacts/{wildcards.model}/tokens/evaluation.json"
    return {"evaluation": ids, "text": text_of(wildcards.model, "evaluation")}


def quantized_inputs(wildcards):
    """Return the inputs of llama-quantize, and for a mixture the sensitivities that decide its types."""
    gguf_type(wildcards.artifact)  # refuses an unknown size
    folder = f"artifacts/{wildcards.model}"
    mixed = format_of(wildcards.artifact) == "gguf-mixed"
    return {
        "base": f"{folder}/gguf-f16",
        "imatrix": imatrix(wildcards),
        "sensitivity": f"{folder}/gguf-sensitivity.json" if mixed else None,
    }


GGUF = {"layout": "gguf", "engine": "llama_cpp", "env": "llama_cpp", "program": "build.gguf", "source": "safetensors"}
GGUF |= {"gate_env": "llama_cpp", "gpu": False, "priority": 5}
OF_QUANTIZED = {"inputs": quantized_inputs}
OF_CONVERTED = {"inputs": converted_inputs, "flags": lambda wc: {"name": wc.model}, "threads": 1}


def gguf_resources(bits_a_weight, time, **more):
    """Memory and time of llama.cpp's programs, for a type of `bits_a_weight`."""
    return BuildResources(Size(bits_a_weight / 8, files=300_000), GGUF_MEMORY, GGUF_MEMORY, time, **more)


for type_, bits in GGUF_CONVERTED.items():
    resources = gguf_resources(bits, Time(13, ns=1), quantized=False)
    FORMATS[f"gguf-{type_}"] = Format(**GGUF, **OF_CONVERTED, parameters={"type": type_}, resources=resources)
for type_, bits in GGUF_QUANTIZED.items():
    FORMATS[f"gguf-{type_}"] = Format(
        **GGUF,
        **OF_QUANTIZED,
        config="gguf",
        parameters={"type": type_},
        logs=("tokens-calibration", "gguf-f16", "imatrix"),
        resources=gguf_resources(bits, Time(2, ns=20 if type_.startswith("iq") else 3 if type_ == "q8_0" else 8)),
    )
FORMATS["gguf-mixed"] = Format(
    **GGUF,
    **OF_QUANTIZED,
    config="gguf_mixed",
    logs=("tokens-calibration", "gguf-f16", "imatrix", "gguf-sensitivity"),
    resources=gguf_resources(GGUF_QUANTIZED["q4_k_m"], Time(2, ns=20), bits=GGUF_QUANTIZED),
)


localrules:
    llama_cpp,


rule llama_cpp:
    input:
        environment("llama_cpp", compiled=False),
    output:
        directory(LLAMA_CPP),
    log:
        "artifacts/logs/libraries/llama.cpp.log",
    threads: 1024
    params:
        program=program("llamacpp.compile", CHECKOUT / "envs/llama-cpp-python.sdist"),
        tools=Path(shutil.which(python("llama_cpp")) or python("llama_cpp")).parent,
        build=[f"--build={config['llama_cpp']}"] if config.get("llama_cpp") else [],
    shell:
        "{sys.executable:q} {params.program.command:q} {output:q} --tools {params.tools:q} {params.build:q} 2> {log:q}"


rule imatrix:
    input:
        env=environment("llama_cpp"),
        base="artifacts/{model}/gguf-f16",
        calibration="artifacts/{model}/tokens/calibration.json",
        evaluation="artifacts/{model}/tokens/evaluation.json",
        text=lambda wc: text_of(wc.model, "calibration"),
    output:
        directory("artifacts/{model}/imatrix"),
    log:
        "artifacts/logs/{model}/imatrix.log",
    threads: 8
    resources:
        **request(lambda wc, input: study_jobs().imatrix(shape_of_model(wc, input.base))),
        gpu=1,
    params:
        program=program("build.imatrix"),
        python=python("llama_cpp"),
        device=lambda wc: STUDY["device"],
        options=lambda wc: [f"--{key.replace('_', '-')}={value}" for key, value in STUDY["calibration"].items()],
    shell:
        "{params.python:q} {params.program.command:q} {input.base:q} {output:q} --text {input.text:q}"
        " --calibration {input.calibration:q} --evaluation {input.evaluation:q} --threads {threads}"
        " --device {params.device:q} {params.options:q} 2> {log:q}"


rule gguf_sensitivity:
    input:
        env=environment("llama_cpp"),
        source="artifacts/{model}/safetensors",
        base="artifacts/{model}/gguf-f16",
        imatrix="artifacts/{model}/imatrix",
        calibration="artifacts/{model}/tokens/calibration.json",
        evaluation="artifacts/{model}/tokens/evaluation.json",
    output:
        "artifacts/{model}/gguf-sensitivity.json",
    log:
        "artifacts/logs/{model}/gguf-sensitivity.log",
    threads: 8
    resources:
        **request(lambda wc, input: study_jobs().sensitivity(shape_of_model(wc, input.source))),
        gpu=1,
    params:
        program=program("build.gguf_sensitivity"),
        python=python("llama_cpp"),
        seed=lambda wc: STUDY["seed"],
        device=lambda wc: STUDY["device"],
    shell:
        "{params.python:q} {params.program.command:q} {input.source:q} {output:q} --base {input.base:q}"
        " --imatrix {input.imatrix:q} --calibration {input.calibration:q} --evaluation {input.evaluation:q}"
        " --seed {params.seed:q} --threads {threads} --device {params.device:q} 2> {log:q}"
