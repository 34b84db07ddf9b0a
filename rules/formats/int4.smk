"""gptq-int4, awq-int4 and autogptq-int4: four bits a weight, calibrated."""

for name, layout, engine, env, key in (
    ("gptq-int4", "gptq", "gptqmodel", "gptqmodel", "gptq"),
    ("awq-int4", "awq", "gptqmodel", "gptqmodel", "awq"),
    ("autogptq-int4", "gptq", "autogptq", "autogptq", "gptq"),
):
    FORMATS[name] = Format(layout=layout, engine=engine, env=env, parameters=key, logs=("tokens-calibration",))
QUANTIZERS = {"gptq-int4": "build_gptq.py", "awq-int4": "build_awq.py", "autogptq-int4": "build_autogptq.py"}


def quantizer_options(wildcards):
    """What the config says to a tool, as its program's flags."""
    config = parameters(wildcards.format) | STUDY["calibration"] | {"seed": STUDY["seed"], "format": wildcards.format}
    return [f"--{key.replace('_', '-')}={value}" for key, value in config.items()]


def quantizer_memory(wildcards, input):
    """MB for the job: for all samples, or for those that its text can fill."""
    model = shape.of_folder(local(input.source))
    tokens = local(input.calibration).stat().st_size // memory.BYTES_AN_ID
    calibration = memory.filled(STUDY["calibration"], model, tokens)
    asked = STUDY["device"], has_gate(wildcards), STUDY["perplexity"]
    return job_mb(memory.build_mb(base(wildcards.format), model, calibration, *asked))


def quantizer_disk(wildcards, input):
    """MB for the artifact and its gate, and for what lies beside it: progress, what is packed, and what the tool saves."""
    format, words = base(wildcards.format), parameters(wildcards.format)
    group = words["q_group_size" if format == "awq-int4" else "group_size"]
    model = shape.of_folder(local(input.source))
    built = disk.build_mb(format, model, STUDY["device"], has_gate(wildcards), group)
    return built + 3 * disk.artifact_mb(format, model, group)


# A job that was killed goes on: gptqmodel saves its progress after every block, of Llama and Qwen3-MoE (beside the
# artifact, in .FORMAT.resume-…). autoawq and auto-gptq have nothing of the kind and begin anew (docs/FOOTGUNS.md).
rule quantize:
    input:
        env=lambda wc: environment(FORMATS[base(wc.format)].env),
        source="artifacts/{model}/fp16",
        calibration="artifacts/{model}/tokens/calibration.json",
        evaluation="artifacts/{model}/tokens/evaluation.json",
        gate=gate_input,
    output:
        directory("artifacts/{model}/{format}"),
    log:
        "artifacts/logs/{model}/{format}.log",
    wildcard_constraints:
        format=names(*QUANTIZERS),
    threads: 8
    resources:
        gpu=1,
        mem_mb=quantizer_memory,
        disk_mb=quantizer_disk,
        runtime=build_minutes,
    params:
        program=lambda wc: program(QUANTIZERS[base(wc.format)]),
        python=lambda wc: python(FORMATS[base(wc.format)].env),
        device=lambda wc: STUDY["device"],
        options=quantizer_options,
        gate=gate_options,
    shell:
        "{params.python:q} {params.program[0]} {input.source} {output} --calibration {input.calibration}"
        " --evaluation {input.evaluation} --device {params.device} --threads {threads} {params.options:q} {params.gate:q} 2> {log}"
