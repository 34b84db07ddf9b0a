"""CTranslate2: ct2-int8, ct2-float16 and ct2-float32, one conversion with three quantizations."""

# The weights are streamed: beyond the libraries a tensor is held, and that only if an architecture rearranges it
for quantization, size, ns in (("int8", Size(1, row=4), 6), ("float16", Size(2), 4), ("float32", Size(4), 7)):
    FORMATS[f"ct2-{quantization}"] = Format(
        layout="ct2",
        engine="ctranslate2",
        env="torch",
        program="build.ct2",
        parameters={"quantization": quantization},
        source="safetensors",
        gpu=False,
        threads=1,
        resources=BuildResources(
            size,
            cpu=Memory(500 + CUDA_BUILD),
            cuda=Memory(1050),
            time=Time(6, ns),
            quantized=quantization == "int8",
        ),
    )
