"""auto-gptq 0.7.1's kernels in transformers 4's model. Its environment is for Python 3.11 alone."""

ENGINES["autogptq"] = Engine(
    env="autogptq",
    loads=("gptq",),
    python="3.11",
    resources=RunResources(cpu=780 + CUDA_BUILD, cuda=2000, start=9, block=0.0008, weights=2),
)
