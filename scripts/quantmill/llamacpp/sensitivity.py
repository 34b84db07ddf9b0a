"""Divergence of a model's predictions when one of its matrices changes, or those of a layer's experts."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from quantmill.common import remote_code
from quantmill.common.program import UserError, first_line

ROWS = 64  # positions that are compared at a time, in float64
LAYER = re.compile(r"(.*?)\.(\d+)\.")

remote_code.forbid()


def experts_matrices(name: str, stack: torch.Tensor) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield names of experts' matrices, as models have them with a module for each expert, and what each can stand for.

    stack: a parameter that holds those of a layer. Some models store them transposed; gate and up are halves of one
    matrix, or alternate in it. All that is yielded are views [experts, outputs, inputs].
    """
    ways, (module, _, part) = (stack, stack.mT), name.rpartition(".")
    if part != "gate_up_proj":
        yield name, [*ways]
        return
    for place, half in enumerate(("gate_proj", "up_proj")):
        yield f"{module}.{half}", [view for way in ways for view in (way.chunk(2, dim=1)[place], way[:, place::2])]


class Model:
    """A model in float32, and its predictions for a few windows of token ids."""

    def __init__(self, folder: Path, device: str, threads: int, windows: list[list[int]]) -> None:
        torch.set_num_threads(threads)
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except Exception as error:  # whatever its many model classes raise
            raise UserError(f"{folder}: transformers cannot load it ({first_line(error)})") from None
        self.model: Any = model.to(device).eval().requires_grad_(False)
        self.matrices = {name: each.data for name, each in model.named_parameters() if each.ndim == 2}
        stacks = {name: each.data for name, each in model.named_parameters() if each.ndim == 3}
        # what each name of experts' matrices can stand for, until `settle`
        self.experts = {name: ways for each in stacks.items() for name, ways in experts_matrices(*each)}
        self.windows = [torch.tensor([window], device=device) for window in windows]
        stem = next((match[1] for name in self.matrices if (match := LAYER.match(name))), None)
        self.stem = stem
        self.layers = list(self.model.get_submodule(stem)) if stem else []
        # each layer's output for each window, so that only what follows a matrix is calculated again
        self.outputs: list[list[Any]] = [[] for _ in self.layers]
        hooks = [
            layer.register_forward_hook(lambda _, __, output, kept=kept: kept.append(output))
            for layer, kept in zip(self.layers, self.outputs, strict=True)
        ]
        self.expected = [self._predict(window) for window in self.windows]
        for hook in hooks:
            hook.remove()
        self.resumable = all(
            torch.equal(self._resume(number, len(self.layers)), expected)
            for number, expected in enumerate(self.expected)
        )

    def settle(self, name: str, is_right: Callable[[np.ndarray], bool]) -> bool:
        """Give a name the first matrix that is right, of those that it can stand for; return whether there is one."""
        for matrix in self.experts[name] if name in self.experts else [self.matrices[name]]:
            self.matrices[name] = matrix
            if is_right(self.weights(name)):
                return True
        return False

    def weights(self, name: str) -> np.ndarray:
        """Return a matrix [outputs, inputs], or those of a layer's experts [experts, outputs, inputs]."""
        return self.matrices[name].cpu().numpy()

    def divergence(self, name: str, weights: np.ndarray) -> float:
        """Mean KL divergence, in nats a token, from the model's own predictions with these weights in one matrix."""
        matrix = self.matrices[name]
        own = matrix.clone()
        matrix.copy_(torch.from_numpy(weights))
        try:
            start = self.first_layer(name) if self.resumable else 0
            found = [self._compare(self._resume(number, start), number) for number in range(len(self.windows))]
        finally:
            matrix.copy_(own)
        return max(0.0, sum(found) / sum(window.numel() for window in self.windows))

    def first_layer(self, name: str) -> int:
        """Return the first layer that has to be calculated again."""
        match = LAYER.match(name)
        if match and match[1] == self.stem:
            return int(match[2])
        head = self.model.get_output_embeddings()
        embeddings = self.model.get_input_embeddings()
        only_head = head is not None and self.model.get_parameter(name) is head.weight is not embeddings.weight
        return len(self.layers) if only_head else 0

    def _resume(self, number: int, start: int) -> torch.Tensor:
        """Log-probabilities [positions, vocabulary] of a window; layers before `start` return their first outputs."""

        def replay(output: Any, *_: Any, **__: Any) -> Any:
            return output

        skipped = list(zip(self.layers, self.outputs, strict=True))[:start]
        for layer, outputs in skipped:
            layer.forward = partial(replay, outputs[number])
        try:
            return self._predict(self.windows[number])
        finally:
            for layer, _ in skipped:
                del layer.forward

    @torch.inference_mode()
    def _predict(self, window: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.model(input_ids=window, use_cache=False).logits[0], dim=-1)

    @torch.inference_mode()
    def _compare(self, found: torch.Tensor, number: int) -> float:
        """Sum over positions of the KL divergence."""
        total = 0.0
        for ours, theirs in zip(found.split(ROWS), self.expected[number].split(ROWS), strict=True):
            expected = theirs.double()
            total += float((expected.exp() * (expected - ours.double())).sum())
        return total
