"""A model's head: what turns its last hidden states into logits."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# keys of a config.json by which models of transformers multiply their logits, and by which they divide them
FACTORS, DIVISORS = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
CAP = "final_logit_softcapping"


@dataclass(frozen=True)
class Head:
    """logits = cap * tanh(scale * (states @ weight.T + bias) / cap), and without the tanh where `cap` is None.

    weight [vocab, hidden] and bias [vocab] are tensors of one dtype and device, or float32 arrays.
    """

    weight: Any
    bias: Any = None
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of_config(cls, weight: Any, bias: Any, config: Mapping[str, Any]) -> "Head":
        """Return a model's head with the scale and cap that its config.json names."""
        scale = 1.0
        for key in FACTORS:
            scale *= config.get(key) or 1
        for key in DIVISORS:
            scale /= config.get(key) or 1
        return cls(weight, bias, scale, config.get(CAP))

    def logits(self, states: Any) -> Any:
        """Return float32 logits [n, vocab] of hidden states [n, hidden], which are as the weights are.

        Tensors are multiplied in their own dtype, as the model does it.
        """
        if isinstance(states, np.ndarray):
            found = states @ self.weight.T
            found += 0 if self.bias is None else self.bias
            found *= self.scale
            return found if self.cap is None else self.cap * np.tanh(found / self.cap)
        torch = sys.modules["torch"]
        with torch.inference_mode():
            found = torch.nn.functional.linear(states, self.weight, self.bias)
            if self.scale != 1:
                found = found * self.scale
            if self.cap is not None:
                found = torch.tanh(found / self.cap) * self.cap
            return found.float()
