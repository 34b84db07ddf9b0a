"""gptq-int4 and awq-int4: four bits a weight, calibrated; run by gptqmodel's kernels."""

FORMATS["gptq-int4"] = Format(env="gptqmodel", engine="gptqmodel")
FORMATS["awq-int4"] = Format(env="gptqmodel", engine="gptqmodel")
QUANTIZERS = {"gptq-int4": "gptq", "awq-int4": "awq"}


def quantizer_options(wildcards):
    """What the config says to a tool, as its program's flags."""
    config = STUDY[QUANTIZERS[wildcards.format]] | STUDY["calibration"] | {"seed": STUDY["seed"]}
    return [f"--{key.replace('_', '-')}={value}" for key, value in config.items()]


rule quantize:
    input:
        program=lambda wc: program(f"build_{QUANTIZERS[wc.format]}.py"),
        env=environment("gptqmodel"),
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
    params:
        python=python("gptqmodel"),
        device=lambda wc: STUDY["device"],
        options=quantizer_options,
        gate=gate_options,
    shell:
        "{params.python:q} {input.program[0]} {input.source} {output} --calibration {input.calibration}"
        " --evaluation {input.evaluation} --device {params.device} {params.options:q} {params.gate:q} 2> {log}"
