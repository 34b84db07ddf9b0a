"""gptq-int4, awq-int4 and autogptq-int4: four bits a weight, calibrated."""

from dataclasses import replace

# Matrices of the blocks in 4 bits, with a scale of 2 bytes and a zero of half a byte a group; all else in float16
AWQ_SIZE = Size(0.5, rest=2, group=2.5)
GPTQ_SIZE = replace(AWQ_SIZE, input=4)  # g_idx, an int32: the group of each input
# The whole model in float32, twice: as read and as changed; with CUDA in float16, freed before its libraries are loaded.
# All tools keep the samples' activations and, on a CPU, the attention of one sample.
WHOLE = Memory(1260 + CUDA_BUILD, weights=8, block=12, activations=24, attention=8)
WHOLE_CUDA = Memory(1210, weights=2, activations=12, least=2045)
# copies: progress, what is packed, and what the tool saves
CALIBRATED = {"copies": 3, "like": ("gptq-int4", "awq-int4", "autogptq-int4")}
GPTQ_COSTS = BuildResources(
    GPTQ_SIZE,
    # gptqmodel holds embeddings, head and one block at a time
    cpu=Memory(945 + CUDA_BUILD, tables=8, block=8, activations=24, attention=8),
    cuda=Memory(2310, tables=3, block=3, activations=12),
    forwards=4,
    group_size="group_size",
    **CALIBRATED,
)
# awq tries 20 scales a layer
AWQ_COSTS = BuildResources(AWQ_SIZE, WHOLE, WHOLE_CUDA, forwards=25, group_size="q_group_size", **CALIBRATED)
AUTOGPTQ_COSTS = replace(GPTQ_COSTS, cpu=replace(WHOLE, libraries=525 + CUDA_BUILD), cuda=WHOLE_CUDA)

for name, layout, engine, env, key, program_, resources in (
    ("gptq-int4", "gptq", "gptqmodel", "gptqmodel", "gptq", "build.gptq", GPTQ_COSTS),
    ("awq-int4", "awq", "gptqmodel", "gptqmodel", "awq", "build.awq", AWQ_COSTS),
    ("autogptq-int4", "gptq", "autogptq", "autogptq", "gptq", "build.autogptq", AUTOGPTQ_COSTS),
):
    FORMATS[name] = Format(
        layout=layout,
        engine=engine,
        env=env,
        program=program_,
        config=key,
        calibrated=True,
        resources=resources,
    )
