"""gptq-int4, awq-int4 and autogptq-int4: four bits a weight, calibrated."""

from dataclasses import replace

# Matrices of the blocks in 4 bits, with a scale of 2 bytes and a zero of half a byte a group; all else in float16
AWQ_SIZE = Size(0.5, rest=2, group=2.5)
GPTQ_SIZE = replace(AWQ_SIZE, input=4)  # g_idx, an int32: the group of each input
# The whole model in float32, twice: as read and as changed; with CUDA in float16, which is gone when its libraries are
# there. All tools keep the samples' activations and, on a CPU, the attention of one sample.
WHOLE = Memory(1260, weights=8, block=12, activations=24, attention=8)
WHOLE_CUDA = Memory(1210, weights=2, activations=12, least=2045)
# copies: progress, what is packed, and what the tool saves
CALIBRATED = {"copies": 3, "like": ("gptq-int4", "awq-int4", "autogptq-int4")}
GPTQ_COSTS = Costs(
    GPTQ_SIZE,
    # gptqmodel holds embeddings, head and one block at a time
    cpu=Memory(945, tables=8, block=8, activations=24, attention=8),
    cuda=Memory(2310, tables=3, block=3, activations=12),
    forwards=4,
    group_size="group_size",
    **CALIBRATED,
)
# awq tries 20 scales a layer
AWQ_COSTS = Costs(AWQ_SIZE, WHOLE, WHOLE_CUDA, forwards=25, group_size="q_group_size", **CALIBRATED)
AUTOGPTQ_COSTS = replace(GPTQ_COSTS, cpu=replace(WHOLE, libraries=525), cuda=WHOLE_CUDA)

for name, layout, engine, env, key, costs in (
    ("gptq-int4", "gptq", "gptqmodel", "gptqmodel", "gptq", GPTQ_COSTS),
    ("awq-int4", "awq", "gptqmodel", "gptqmodel", "awq", AWQ_COSTS),
    ("autogptq-int4", "gptq", "autogptq", "autogptq", "gptq", AUTOGPTQ_COSTS),
):
    FORMATS[name] = Format(
        layout=layout, engine=engine, env=env, parameters=key, logs=("tokens-calibration",), costs=costs
    )
QUANTIZERS = {"gptq-int4": "build_gptq.py", "awq-int4": "build_awq.py", "autogptq-int4": "build_autogptq.py"}


def quantizer_options(wildcards):
    """What the config says to a tool, as its program's flags."""
    config = parameters(wildcards.format) | STUDY["calibration"] | {"seed": STUDY["seed"], "format": wildcards.format}
    return [f"--{key.replace('_', '-')}={value}" for key, value in config.items()]


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
        mem_mb=build_memory,
        disk_mb=build_disk,
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
