"""ct-w4a16, ct-w8a8, ct-fp8, ct-nvfp4a16, ct-nvfp4 and ct-mxfp4: compressed-tensors, by llm-compressor.

The default run measures only quality, because transformers unpacks the weights. Runs by vLLM measure speed.
"""

# The whole model in float32 and packed; with samples, their activations between blocks and GPTQ's Hessians of one block
ROUNDED = Memory(550 + CUDA_BUILD, weights=6)
SAMPLED = Memory(550 + CUDA_BUILD, weights=6, block=12, activations=24, attention=8)

for name, size, forwards, parameters_ in (
    ("ct-w4a16", Size(0.5, rest=2, group=2), 4, {"scheme": "W4A16"}),
    ("ct-w8a8", Size(1, rest=2, row=4), 4, {"scheme": "W8A8"}),
    ("ct-fp8", Size(1, rest=2, row=4), 0, {"scheme": "FP8_DYNAMIC"}),
    ("ct-nvfp4a16", Size(0.5, rest=2, group=1, group_size=16), 0, {"scheme": "NVFP4A16", "group_size": 16}),
    ("ct-nvfp4", Size(0.5, rest=2, group=1, group_size=16), 2, {"scheme": "NVFP4", "group_size": 16}),
    ("ct-mxfp4", Size(0.5, rest=2, group=1, group_size=32), 0, {"scheme": "MXFP4", "group_size": 32}),
):
    chosen = name == "ct-w4a16"  # whose group size the scheme leaves open
    FORMATS[name] = Format(
        layout="compressed-tensors",
        engine="compressed-tensors",
        env="quantizers",
        program="build.llmcompressor",
        config="llmcompressor" if chosen else None,
        parameters=parameters_,
        calibrated=forwards > 0,
        resources=BuildResources(
            size,
            SAMPLED if forwards else ROUNDED,
            QUANTIZER_CUDA,
            forwards=forwards,
            group_size="group_size" if chosen else None,
            copies=2,
            like=("gptq-int4",) if forwards else UNCALIBRATED,
        ),
    )
