"""CTranslate2: ct2-int8, ct2-float16 and ct2-float32, one converter with three quantizations."""

CT2_FLOATS = ("ct2-float16", "ct2-float32")  # take about as long


def ct2_resources(size, like=(), **grown):
    """Resources of the converter, with torch and transformers."""
    return BuildResources(size, Memory(430 + CUDA_BUILD, **grown), Memory(935, **grown), quantized=not like, like=like)


for quantization, resources in {
    "int8": ct2_resources(Size(1, row=4), weights=2.7, tables=4),  # a table is quantized in float32
    "float16": ct2_resources(Size(2), CT2_FLOATS, weights=2.7),
    "float32": ct2_resources(Size(4), CT2_FLOATS, weights=6.2),
}.items():
    FORMATS[f"ct2-{quantization}"] = Format(
        layout="ct2",
        engine="ctranslate2",
        env="torch",
        program="build.ct2",
        parameters={"quantization": quantization},
        source="safetensors",
        gpu=False,
        threads=1,
        resources=resources,
    )
