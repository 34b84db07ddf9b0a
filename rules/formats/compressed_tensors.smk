"""ct-w4a16, ct-w8a8, ct-fp8, ct-nvfp4a16, ct-nvfp4 and ct-mxfp4: compressed-tensors, by llm-compressor.

The default run tells the quality alone: transformers unpacks the weights. Speed is measured in runs by vLLM.
"""

# The whole model in float32 and packed; with samples, their activations between blocks and GPTQ's Hessians of one block
ROUNDED = Memory(550 + CUDA_BUILD, weights=6)
SAMPLED = Memory(550 + CUDA_BUILD, weights=6, block=12, activations=24, attention=8)

for name, scheme, size, forwards in (
    ("ct-w4a16", "W4A16", Size(0.5, rest=2, group=2), 4),
    ("ct-w8a8", "W8A8", Size(1, rest=2, row=4), 4),
    ("ct-fp8", "FP8_DYNAMIC", Size(1, rest=2, row=4), 0),
    ("ct-nvfp4a16", "NVFP4A16", Size(0.5, rest=2, group=1, group_size=16), 0),
    ("ct-nvfp4", "NVFP4", Size(0.5, rest=2, group=1, group_size=16), 2),
    ("ct-mxfp4", "MXFP4", Size(0.5, rest=2, group=1, group_size=32), 0),
):
    FORMATS[name] = Format(
        layout="compressed-tensors",
        engine="compressed-tensors",
        env="quantizers",
        parameters="llmcompressor" if scheme == "W4A16" else None,
        quantizer=("build.llmcompressor", f"--scheme={scheme}"),
        logs=("tokens-calibration",) if forwards else (),
        resources=BuildResources(
            size,
            SAMPLED if forwards else ROUNDED,
            QUANTIZER_CUDA,
            forwards=forwards,
            group_size="group_size" if scheme == "W4A16" else None,
            copies=2,
            like=("gptq-int4",) if forwards else UNCALIBRATED,
        ),
    )
