"""CTranslate2: ct2-int8, ct2-float16 and ct2-float32, one converter with three quantizations."""

for quantization, size, weights, ns in (
    ("int8", Size(1, row=4), 3.3, 11),
    ("float16", Size(2), 3.3, 6),
    ("float32", Size(4), 6.3, 9),
):
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
            cpu=Memory(500 + CUDA_BUILD, weights),
            cuda=Memory(1050, weights),
            time=Time(6, ns),
            quantized=quantization == "int8",
        ),
    )
