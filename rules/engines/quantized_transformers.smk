"""Engines that run transformers' model with the layers of a library that quantizes, all in one environment."""

# Builds of several formats without calibration, the whole model as it is stored and as it becomes; and with it
ROUNDED = Memory(440 + CUDA_BUILD, weights=6)
ROUNDED_CUDA = Memory(1250, weights=2)
ROUNDED_TIME = Time(3, ns=2.2, flop=8e3)
SAMPLED_CUDA = Memory(1800, weights=3, activations=12)

for name, block, words in (
    ("bitsandbytes", 0.0017, {}),
    ("torchao", 0.0014, {}),
    ("hqq", 0.0025, {}),
    (
        "compressed-tensors",
        0.0014,
        {"no_speed": "transformers unpacks its weights: only a server's speed is the format's; add a run by vllm"},
    ),
):
    ENGINES[name] = Engine(
        env="quantizers",
        loads=(name,),
        options={"dtype": {"type": "string"}, "attn_implementation": {"type": "string"}},
        resources=RunResources(cpu=440 + CUDA_BUILD, cuda=1800, start=7, block=block, weights=4),
        **words,
    )
