"""ct-w4a16, ct-w8a8, ct-fp8, ct-nvfp4a16, ct-nvfp4 and ct-mxfp4: compressed-tensors, by llm-compressor.

The default run measures only quality, because transformers unpacks the weights. Runs by vLLM measure speed.
"""

for name, size, forwards, parameters_ in (
    ("ct-w4a16", Size(0.5, rest=2, group=2), 3, {"scheme": "W4A16"}),
    ("ct-w8a8", Size(1, rest=2, row=4), 3, {"scheme": "W8A8"}),
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
            cpu=Memory(650 + CUDA_BUILD, weights=6, activations=24 if forwards else 0),
            cuda=SAMPLED_CUDA if forwards else ROUNDED_CUDA,
            time=Time(6, block=1, forwards=forwards) if forwards else Time(4, ns=2.2),
            group_size="group_size" if chosen else None,
            copies=2,
            placements=placement.LLM_COMPRESSOR,
        ),
    )
