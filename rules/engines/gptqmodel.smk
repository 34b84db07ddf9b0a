"""gptqmodel's kernels in transformers' model."""

ENGINES["gptqmodel"] = Engine(
    env="gptqmodel",
    loads=("gptq", "awq"),
    options={"backend": {"type": "string"}},
    resources=RunResources(cpu=780 + CUDA_BUILD, cuda=2000, start=9, block=0.0008, weights=2),
)
