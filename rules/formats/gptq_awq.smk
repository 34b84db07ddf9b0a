"""gptq-int4, awq-int4 and autogptq-int4: four bits a weight, calibrated."""

from dataclasses import replace

# Matrices of the blocks in 4 bits, with a scale of 2 bytes and a zero of half a byte a group; all else in float16
AWQ_SIZE = Size(0.5, rest=2, group=2.5)
GPTQ_SIZE = replace(AWQ_SIZE, input=4)  # g_idx, an int32: the group of each input
# All tools keep the samples' activations. awq and auto-gptq hold the whole model: in float32, twice, as read and as
# changed; with CUDA in float16. gptqmodel holds embeddings, head and one block at a time.
WHOLE = Memory(1600 + CUDA_BUILD, weights=8, activations=59)
WHOLE_CUDA = Memory(2130, weights=2, activations=40)
GPTQ_COSTS = BuildResources(
    GPTQ_SIZE,
    cpu=Memory(1200 + CUDA_BUILD, weights=2, activations=65),
    cuda=Memory(2450, weights=0.3, activations=12),
    time=Time(10, ns=10, block=1.7, forwards=4),
    group_size="group_size",
    copies=3,  # progress, what is packed, and what the tool saves
    placements=placement.GPTQMODEL,
)
AUTOGPTQ_COSTS = replace(
    GPTQ_COSTS, cpu=replace(WHOLE, libraries=700 + CUDA_BUILD), cuda=WHOLE_CUDA, placements=placement.AUTOGPTQ
)
AWQ_COSTS = BuildResources(
    AWQ_SIZE,
    WHOLE,
    WHOLE_CUDA,
    Time(10, ns=50, block=1.7, forwards=25),  # awq tries 20 scales a layer
    group_size="q_group_size",
    copies=3,
)

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
