"""Hugging Face transformers: the reference, in float16 on a GPU and float32 on a CPU."""

ENGINES["transformers"] = Engine(
    env="torch",
    loads=("hf",),
    options={"dtype": {"type": "string"}, "attn_implementation": {"type": "string"}},
    resources=RunResources(cpu=420 + CUDA_BUILD, weights=4, floor=1845, cuda=1100, mapped=True),
)
