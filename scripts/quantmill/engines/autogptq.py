"""GPTQ through auto-gptq 0.7.1's kernels, in transformers 4's model."""

from pathlib import Path

import auto_gptq
from transformers import DynamicCache, PreTrainedModel

from quantmill.checkpoint import shards
from quantmill.common.program import UserError, first_line
from quantmill.engines import transformers


class Engine(transformers.Engine):
    """See `engines.Engine`."""

    def __init__(self, artifact: Path, device: str, threads: int) -> None:
        super().__init__(artifact, device, threads)

    def _load(self, artifact: Path, device: str) -> PreTrainedModel:
        stored = shards.find(artifact).tensors()
        on_cpu = device == "cpu"
        dtype = self.dtype
        try:
            model = auto_gptq.AutoGPTQForCausalLM.from_quantized(
                str(artifact),
                device="cpu" if on_cpu else "cuda:0",
                torch_dtype=dtype,
                disable_exllama=on_cpu or None,  # on CUDA it chooses the fastest that it was compiled with
                disable_exllamav2=on_cpu,
            ).model
        except Exception as error:  # its kernels and transformers' classes raise many kinds
            raise UserError(f"{artifact}: auto-gptq cannot load it ({first_line(error)})") from None
        layers = {name: module for name, module in model.named_modules() if hasattr(module, "qweight")}
        needed = {name for name, _ in model.named_parameters()}
        needed |= {f"{name}.{part}" for name in layers for part in ("qweight", "qzeros", "scales")}
        missing = sorted(needed - stored.keys())  # auto-gptq leaves them uninitialised, without a word
        if missing:
            raise UserError(f"{artifact}: lacks {', '.join(missing[:3])}, which would be random; build it again")
        first = next(iter(layers.values()))
        compiled = not on_cpu and getattr(first, "autogptq_cuda_available", True)
        self.kernel = first.QUANT_TYPE if compiled else f"{first.QUANT_TYPE} (torch)"
        self.compute_type = str(dtype).removeprefix("torch.")
        self.quantized_bytes = sum(buffer.nbytes for module in layers.values() for buffer in module.buffers())
        return model

    def _modes(self) -> tuple[str, ...]:
        return ("generate",)  # transformers 4 has another static cache

    def _cache(self) -> DynamicCache:
        return DynamicCache()  # of transformers 4, which takes no config

    def held_bytes(self) -> dict[str, int]:
        return super().held_bytes() | {"quantized layers": self.quantized_bytes}

    def versions(self) -> dict[str, str]:
        return super().versions() | {"auto-gptq": auto_gptq.__version__, "kernel": self.kernel}
