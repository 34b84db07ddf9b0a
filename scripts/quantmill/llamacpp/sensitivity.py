"""Divergence of a model's predictions when one of its matrices changes."""

import re
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


class Model:
    """A model in float32, and its predictions for a few windows of token ids."""

    def __init__(self, folder: Path, device: str, threads: int, windows: list[list[int]]) -> None:
        torch.set_num_threads(threads)
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except Exception as error:  # whatever its many model classes raise
            raise UserError(f"{folder}: transformers cannot load it ({first_line(error)})") from None
        self.model: Any = model.to(device).eval().requires_grad_(False)
        self.matrices = {name: each for name, each in model.named_parameters() if each.ndim == 2}
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

    def weights(self, name: str) -> np.ndarray:
        """Return a matrix [outputs, inputs]."""
        return self.matrices[name].cpu().numpy()

    def divergence(self, name: str, weights: np.ndarray) -> float:
        """Mean KL divergence, in nats a token, from the model's own predictions with these weights in one matrix."""
        matrix = self.matrices[name]
        own = matrix.data
        matrix.data = torch.from_numpy(weights).to(own.device)
        try:
            start = self.first_layer(name) if self.resumable else 0
            found = [self._compare(self._resume(number, start), number) for number in range(len(self.windows))]
        finally:
            matrix.data = own
        return max(0.0, sum(found) / sum(window.numel() for window in self.windows))

    def first_layer(self, name: str) -> int:
        """Return the first layer that has to be calculated again."""
        match = LAYER.match(name)
        if match and match[1] == self.stem:
            return int(match[2])
        head = self.model.get_output_embeddings()
        embeddings = self.model.get_input_embeddings()
        only_head = head is not None and self.matrices[name] is head.weight and head.weight is not embeddings.weight
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
