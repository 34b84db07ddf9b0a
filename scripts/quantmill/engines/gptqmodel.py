"""GPTQ and AWQ through gptqmodel's kernels, in transformers' model."""

import os
from pathlib import Path
from typing import Any

# Both are read at import. Its own number of workers is wrong on machines with two cores; no kernel sources may come
# from the network
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("GPTQMODEL_OFFLINE", "1")

import gptqmodel
import torch
from gptqmodel import BACKEND
from transformers import PreTrainedModel

from quantmill.checkpoint import shards
from quantmill.common.program import UserError, first_line
from quantmill.engines import transformers
from quantmill.engines.decoding import gemv
from quantmill.engines.decoding.merged import merge

# (method, device, symmetric) -> kernel, dtype of activations, arithmetic of products: the fastest kernel that is right.
# Both fused kernels for CPUs round activations to bfloat16 before each product. gptqmodel's own choice on CUDA is
# Machete, which needs sources from the network and then fails; its fused kernel on a CPU is wrong for asymmetric GPTQ.
KERNELS = {
    ("gptq", "cpu", True): (BACKEND.GPTQ_TORCH_FUSED, torch.float32, "bfloat16"),
    ("gptq", "cpu", False): (BACKEND.GPTQ_TORCH_ATEN, torch.bfloat16, "bfloat16"),
    ("awq", "cpu", False): (BACKEND.AWQ_TORCH_FUSED, torch.float32, "bfloat16"),
    ("gptq", "cuda", True): (BACKEND.GPTQ_MARLIN, torch.float16, "float16"),
    ("gptq", "cuda", False): (BACKEND.GPTQ_TRITON, torch.float16, "float16"),
    ("awq", "cuda", False): (BACKEND.AWQ_MARLIN, torch.float16, "float16"),
}


class Engine(transformers.Engine):
    """See `engines.Engine`."""

    def __init__(self, artifact: Path, device: str, threads: int, backend: str | None = None) -> None:
        if backend and backend not in BACKEND.__members__:
            raise UserError(f"engine gptqmodel: backend {backend!r} is not one of {', '.join(BACKEND.__members__)}")
        self.backend = backend
        super().__init__(artifact, device, threads)

    def _load(self, artifact: Path, device: str) -> PreTrainedModel:
        quantization = shards.read_json(artifact / "config.json").get("quantization_config", {})
        method = quantization.get("quant_method")
        key = (method, device, method == "gptq" and bool(quantization.get("sym", True)))
        if key not in KERNELS:
            raise UserError(f"{artifact}: its quant_method is {method!r}, unknown to this engine; build it again")
        backend, dtype, self.compute_type = KERNELS[key]
        if self.backend:  # what it rounds to is not known: report the dtype that it is given
            backend, self.compute_type = BACKEND[self.backend], str(dtype).removeprefix("torch.")
        try:
            self.loaded = gptqmodel.GPTQModel.load(str(artifact), device=device, backend=backend, dtype=dtype)
        except Exception as error:  # its kernels and transformers' classes raise many kinds
            raise UserError(f"{artifact}: gptqmodel cannot load it ({first_line(error)})") from None
        model = self.loaded.model
        self.artifact, self.quantization = artifact, quantization
        self.marlin = backend in (BACKEND.GPTQ_MARLIN, BACKEND.AWQ_MARLIN) and not quantization.get("desc_act")
        self.kind = next(type(module) for module in model.modules() if hasattr(module, "qweight"))
        self.kernel = self.kind.__name__
        self.quantized_bytes = _quantized_bytes(model)
        return model

    def _call_generate(self, ids: torch.Tensor, **options: Any) -> None:
        self.loaded.generate(ids, **options)  # the library's, in inference mode

    def _merge(self) -> None:
        super()._merge()
        if not self.marlin:
            return
        merge(self.model, self.kind)
        self.quantized_bytes = _quantized_bytes(self.model)  # former parameters are buffers now
        products = sum(type(module) is self.kind for module in self.model.modules())
        if wrapped := gemv.add(self.model, self.kind, self.artifact, self.quantization):
            self.kernel += f"; AWQ GEMV for one position in {wrapped} of {products} products"

    def held_bytes(self) -> dict[str, int]:
        return super().held_bytes() | self.quantized_bytes

    def close(self) -> None:
        del self.loaded
        super().close()

    def versions(self) -> dict[str, str]:
        return super().versions() | {"gptqmodel": gptqmodel.__version__, "kernel": self.kernel}


def _quantized_bytes(model: PreTrainedModel) -> dict[str, int]:
    """Return the bytes of buffers in four-bit layers, by the layers' names, as loaded: kernels may keep their weights
    in another layout, made when they first run."""
    return {
        name: sum(buffer.nbytes for buffer in module.buffers())
        for name, module in model.named_modules()
        if hasattr(module, "qweight")
    }
