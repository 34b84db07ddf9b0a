"""auto-gptq 0.7.1's kernels in transformers 4's model. Its environment is for Python 3.11 alone."""

ENGINES["autogptq"] = Engine(
    env="autogptq",
    loads=("gptq",),
    python="3.11",
    resources=RunResources(cpu=715 + CUDA_BUILD, weights=2, floor=1940, cuda=1510, mapped=True, like="gptqmodel"),
)
