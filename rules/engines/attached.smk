"""Servers that the user runs, at a run's `url`; requests come from the report's environment."""

ATTACHED = {
    "model": {"type": "string", "minLength": 1},
    "token_variable": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
    "authority": {"type": "string", "minLength": 1},
}

for name, layouts in {
    "openai": LAYOUTS.keys(),  # a view: with those that formats' files add
    "tgi": ("hf", "gptq", "awq", "compressed-tensors"),
    "sglang": ("hf", "gptq", "awq", "gguf", "compressed-tensors"),
    "lmdeploy": ("hf", "gptq", "awq"),
    "tensorrt-llm": ("hf", "awq"),
    "ollama": ("gguf",),
    "llamafile": ("gguf",),
    "text-generation-webui": ("hf", "gguf"),
    "deepspeed-mii": ("hf",),
    "mlc-serve": ("mlc",),
    "openvino-model-server": ("hf", "gguf"),
}.items():
    ENGINES[name] = Engine(
        env="tools",
        loads=layouts,
        options=ATTACHED,
        multi_gpu=True,
        serves=True,
        attached=True,
        resources=RunResources(cpu=200, cuda=200, start=5, block=0.0001, held=0),
    )
