"""A model's head: what turns its last hidden states into logits."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

# keys of a config.json by which models of transformers multiply their logits, and by which they divide them
FACTORS, DIVISORS = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
CAP = "final_logit_softcapping"


@dataclass
class Head:
    """logits = cap * tanh(scale * (states @ weight.T + bias) / cap), and without the tanh where `cap` is None.

    weight [vocab, hidden] and bias [vocab] are tensors of one dtype and device, or float32 arrays.
    """

    weight: Any
    bias: Any = None
    scale: float = 1.0
    cap: float | None = None
    room: Any = field(default=None, init=False, repr=False)  # for logits on a CPU: new pages take longer than a product

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
        """Return float32 logits [n, vocab] of hidden states [n, hidden], which are as the weights are: a tensor on a
        GPU, else an array, which the next call overwrites.

        Tensors are multiplied in their own dtype, as the model does it.
        """
        if isinstance(states, np.ndarray):
            made = np.matmul(states, self.weight.T, out=self._room(np, states))
            made += 0 if self.bias is None else self.bias
            return self._finish(made, np)
        torch = sys.modules["torch"]
        with torch.inference_mode():
            if states.device.type != "cpu":
                made = torch.nn.functional.linear(states, self.weight, self.bias)
            elif self.bias is None:
                made = torch.mm(states, self.weight.T, out=self._room(torch, states))
            else:
                made = torch.addmm(self.bias, states, self.weight.T, out=self._room(torch, states))
            logits = self._finish(made, torch).float()
        return logits.numpy() if logits.device.type == "cpu" else logits

    def _room(self, xp: ModuleType, states: Any) -> Any:
        if self.room is None or len(self.room) < len(states):
            self.room = None  # free it before the next one is there
            self.room = xp.empty((len(states), len(self.weight)), dtype=states.dtype)
        return self.room[: len(states)]

    def _finish(self, logits: Any, xp: ModuleType) -> Any:
        """Apply scale and cap in place."""
        if self.scale != 1:
            logits *= self.scale
        if self.cap is not None:
            logits /= self.cap
            xp.tanh(logits, out=logits)
            logits *= self.cap
        return logits
