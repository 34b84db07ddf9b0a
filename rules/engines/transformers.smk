"""Hugging Face transformers: the reference, in float16 on a GPU and float32 on a CPU."""

ENGINES["transformers"] = Engine(
    env="torch",
    loads=("hf",),
    options={"dtype": {"type": "string"}, "attn_implementation": {"type": "string"}},
    # held: a file, as transformers shards, is mapped while it is read
    resources=RunResources(cpu=420 + CUDA_BUILD, cuda=1700, start=6, block=0.0006, weights=4, held=5000),
)
