"""HQQ's own layers in transformers' model: four-bit weights, unpacked for each product."""

from pathlib import Path

import torch
from accelerate import init_empty_weights
from hqq.core.quantize import HQQLinear
from hqq.core.utils import encode_safetensor_type
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quantmill.checkpoint import shards
from quantmill.common.program import UserError
from quantmill.engines import quantized

MARK = ".W_q"  # only a quantized layer has it
FLOATS = ("scale", "zero", "bias")


class Engine(quantized.Engine):
    """See `engines.Engine`."""

    def _load(self, artifact: Path, device: str) -> PreTrainedModel:
        config = AutoConfig.from_pretrained(artifact)
        if hasattr(config, "quantization_config"):  # transformers does not load HQQ
            del config.quantization_config
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype, **self.attention)
        state: dict[str, torch.Tensor] = {}
        for file in shards.find(artifact).files:
            with safe_open(file, "pt", device=device) as opened:
                state |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        layers = [name.removesuffix(MARK) for name in state if name.endswith(MARK)]
        packed: dict[str, dict[str, torch.Tensor]] = {name: {} for name in layers}
        for name in list(state):
            layer, _, part = name.rpartition(".")
            if layer in packed:
                packed[layer][part] = state.pop(name)
        rest = {name: tensor.to(self.dtype) for name, tensor in state.items()}
        missing, surplus = model.load_state_dict(rest, strict=False, assign=True)
        expected = {f"{name}.weight" for name in packed} | ({"lm_head.weight"} if config.tie_word_embeddings else set())
        if wrong := sorted({*missing, *surplus} - expected):
            raise UserError(f"{artifact}: lacks {', '.join(wrong[:3])}, or has surplus tensors; build it again")
        self.layers = []
        for name, parts in packed.items():
            parent, _, last = name.rpartition(".")
            self.layers.append(self._layer(parts, device))
            setattr(model.get_submodule(parent), last, self.layers[-1])
        model.tie_weights()
        self.compute_type = str(self.dtype).removeprefix("torch.")
        return model.to(device)

    def _layer(self, parts: dict[str, torch.Tensor], device: str) -> HQQLinear:
        """Make HQQ's layer from its tensors."""
        found = {key: tensor.to(self.dtype) if key in FLOATS else tensor for key, tensor in parts.items()}
        # replaced, because the library evaluates both as Python code, which a file may hold
        found |= {"compute_dtype": encode_safetensor_type(self.dtype)}
        found |= {"unpack_view_dtype": encode_safetensor_type(torch.uint8)}
        layer = HQQLinear(None, None, compute_dtype=self.dtype, device=device, initialize=False)
        layer.load_state_dict(found)
        return layer

    def stored_bytes(self, layer: torch.nn.Module) -> int:
        return layer.W_q.nbytes + layer.meta["scale"].nbytes + layer.meta["zero"].nbytes

    def kernel(self) -> str:
        return str(HQQLinear.backend)
