"""What runs in transformers' model with the layers of a library that quantizes. One environment has them all."""

# A build of them that calls for no calibration: the whole model, as it is stored and as it becomes. For costs of formats
QUANTIZER = Memory(440 + CUDA_BUILD, weights=6)
QUANTIZER_CUDA = Memory(1800, weights=3, activations=12, least=2600)
ROUNDED_CUDA = Memory(1250, weights=2)  # bitsandbytes' and torchao's, of 1.1B on an H200
UNCALIBRATED = ("bnb-nf4", "hqq-int4", "torchao-int8", "ct2-int8")

for name, layout, words in (
    ("bitsandbytes", "bitsandbytes", {}),
    ("torchao", "torchao", {}),
    ("hqq", "hqq", {}),
    (
        "compressed-tensors",
        "compressed-tensors",
        {"no_speed": "transformers unpacks its weights: only a server's speed is the format's; add a run by vllm"},
    ),
):
    ENGINES[name] = Engine(
        env="quantizers",
        loads=(layout,),
        options={"dtype": {"type": "string"}, "attn_implementation": {"type": "string"}},
        resources=RunResources(
            cpu=440 + CUDA_BUILD, weights=4, floor=2200, cuda=1300, mapped=True, kept=name == "torchao"
        ),
        **words,
    )
