"""Hugging Face transformers' own server, `transformers serve`."""

ENGINES["transformers-serve"] = Engine(
    env="transformers-serve",
    loads=("hf",),
    options=None,
    serves=True,
    resources=RunResources(cpu=600 + CUDA_BUILD, weights=4, floor=1845, cuda=1100, mapped=True, like="transformers"),
)
