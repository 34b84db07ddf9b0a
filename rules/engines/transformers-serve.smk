"""Hugging Face transformers' own server, `transformers serve`."""

ENGINES["transformers-serve"] = Engine(
    env="transformers-serve",
    loads=("hf",),
    options=None,
    serves=True,
    resources=RunResources(cpu=600 + CUDA_BUILD, cuda=1700, start=20, block=0.0007, weights=4),
)
