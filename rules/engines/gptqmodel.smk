"""gptqmodel's kernels in transformers' model."""

ENGINES["gptqmodel"] = Engine(
    env="gptqmodel",
    loads=("gptq", "awq"),
    options={"backend": {"type": "string"}},
    resources=RunResources(cpu=715 + CUDA_BUILD, weights=2, floor=2020, cuda=1590, mapped=True),
)
