"""Experts of a mixture that a calibration text reaches.

A router sends each token to a few experts. For an expert that no token reaches, a tool has nothing to calibrate on and
does not say so: gptqmodel, for example, then rounds its weights to the nearest.
"""

from collections.abc import Callable
from typing import Any

import torch

NAME = "experts"  # of the module that holds a layer's, in transformers


class Counts:
    """Counts of tokens that a model's experts see from now on, by the layer's module and the expert's number."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tokens: dict[str, torch.Tensor] = {}
        for path, module in model.named_modules():
            if path.rpartition(".")[2] != NAME:
                continue
            if isinstance(module, torch.nn.ModuleList):  # transformers 4: a module each
                self.tokens[path] = torch.zeros(len(module), dtype=torch.long)
                for number, expert in enumerate(module):
                    expert.register_forward_pre_hook(self._of_one(path, number), with_kwargs=True)
            else:  # 5: one for all, which gets each token's experts
                module.register_forward_pre_hook(self._of_all(path), with_kwargs=True)

    def _of_one(self, path: str, number: int) -> Callable[..., None]:
        def count(_: torch.nn.Module, inputs: tuple[Any, ...], words: dict[str, Any]) -> None:
            rows = next(each for each in (*inputs, *words.values()) if torch.is_tensor(each))
            self.tokens[path][number] += rows.numel() // rows.shape[-1]

        return count

    def _of_all(self, path: str) -> Callable[..., None]:
        def count(module: torch.nn.Module, inputs: tuple[Any, ...], words: dict[str, Any]) -> None:
            chosen = [each for each in (*inputs, *words.values()) if torch.is_tensor(each) and each.dtype == torch.long]
            experts = getattr(module, "num_experts", None) or len(next(module.parameters()))
            if chosen:
                found = torch.bincount(chosen[0].flatten().cpu(), minlength=experts)[:experts]
                self.tokens[path] = self.tokens.get(path, 0) + found

        return count

    def as_json(self) -> dict[str, Any]:
        """Return the number of experts and the names of those that no token reached, or why they are unknown."""
        names = [
            (f"{path}.{number}", int(n)) for path, tokens in self.tokens.items() for number, n in enumerate(tokens)
        ]
        if not any(n for _, n in names):
            return {"unknown": "its routers do not say where they send a token"}
        return {"count": len(names), "unreached": [name for name, n in names if not n]}
