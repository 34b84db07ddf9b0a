"""gptqmodel's kernels in transformers' model."""

ENGINES["gptqmodel"] = Engine(env="gptqmodel", loads=("gptq", "awq"), options={"backend": {"type": "string"}})
