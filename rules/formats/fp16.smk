"""fp16: the unquantized reference, run by transformers."""

COPYING = Memory(jobs.STREAMING)
FORMATS["fp16"] = Format(
    layout="hf",
    engine="transformers",
    env="tools",
    program="build.fp16",
    parameters={"share": True},
    source="safetensors",
    gpu=False,
    threads=1,
    priority=20,
    resources=BuildResources(Size(2), COPYING, COPYING, Time(0), quantized=False),
)
