"""gptq-int4, awq-int4 and autogptq-int4: four bits a weight, calibrated."""

FORMATS["gptq-int4"] = Format(env="gptqmodel", engine="gptqmodel")
FORMATS["awq-int4"] = Format(env="gptqmodel", engine="gptqmodel")
FORMATS["autogptq-int4"] = Format(env="autogptq", engine="autogptq", python="3.11")
# format -> the program that builds it, and the config's key that holds its parameters
QUANTIZERS = {
    "gptq-int4": ("build_gptq.py", "gptq"),
    "awq-int4": ("build_awq.py", "awq"),
    "autogptq-int4": ("build_autogptq.py", "gptq"),
}


def quantizer_options(wildcards):
    """What the config says to a tool, as its program's flags."""
    _, key = QUANTIZERS[wildcards.format]
    config = STUDY[key] | STUDY["calibration"] | {"seed": STUDY["seed"]}
    return [f"--{key.replace('_', '-')}={value}" for key, value in config.items()]


def quantizer_memory(wildcards, input):
    """MB for the job: for all samples, or for those that its text can fill."""
    model = shape.of_folder(lying(input.source))
    tokens = lying(input.calibration).stat().st_size // memory.BYTES_AN_ID
    calibration = memory.filled(STUDY["calibration"], model, tokens)
    asked = STUDY["device"], gated(wildcards), STUDY["perplexity"]
    return job_mb(memory.build_mb(wildcards.format, model, calibration, *asked))


def quantizer_disk(wildcards, input):
    """MB for the artifact and its gate, and for what lies beside it: progress, what is packed, and what the tool saves."""
    group = STUDY["awq"]["q_group_size"] if wildcards.format == "awq-int4" else STUDY["gptq"]["group_size"]
    model = shape.of_folder(lying(input.source))
    built = disk.build_mb(wildcards.format, model, STUDY["device"], gated(wildcards), group)
    return built + 3 * disk.artifact_mb(wildcards.format, model, group)


# A job that was killed goes on: gptqmodel saves its progress after every block, of Llama and Qwen3-MoE (beside the
# artifact, in .FORMAT.resume-…). autoawq and auto-gptq have nothing of the kind and begin anew (docs/FOOTGUNS.md).
rule quantize:
    input:
        env=lambda wc: environment(FORMATS[wc.format].env),
        source="artifacts/{model}/fp16",
        calibration="artifacts/{model}/tokens/calibration.json",
        evaluation="artifacts/{model}/tokens/evaluation.json",
        gate=gate_input,
    output:
        directory("artifacts/{model}/{format}"),
    log:
        "artifacts/logs/{model}/{format}.log",
    wildcard_constraints:
        format="|".join(QUANTIZERS),
    threads: 8
    resources:
        gpu=1,
        mem_mb=quantizer_memory,
        disk_mb=quantizer_disk,
        runtime=build_minutes,
    params:
        program=lambda wc: program(QUANTIZERS[wc.format][0]),
        python=lambda wc: python(FORMATS[wc.format].env),
        device=lambda wc: STUDY["device"],
        options=quantizer_options,
        gate=gate_options,
    shell:
        "{params.python:q} {params.program[0]} {input.source} {output} --calibration {input.calibration}"
        " --evaluation {input.evaluation} --device {params.device} --threads {threads} {params.options:q} {params.gate:q} 2> {log}"
