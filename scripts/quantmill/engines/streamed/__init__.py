"""A model of transformers that runs block by block: one block's weights are in memory, and the next one's on the way.

Every text goes through a block before the next one is there, so the texts are given together. Memory is that of the
embeddings or the head, two blocks, and the activations of all texts, however many blocks there are.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from quantmill.checkpoint import shards
from quantmill.common.program import UserError
from quantmill.devices import memory
from quantmill.engines.streamed.blocks import EMBEDDINGS, HEAD, REST, Blocks
from quantmill.engines.streamed.relay import Relay

SHARE = 0.9  # of the free memory that a whole model may take


def exceeds_memory(artifact: Path, dtype: torch.dtype, device: str) -> bool:
    """Return whether an artifact's weights in `dtype` do not fit the memory that this process may take."""
    need = dtype.itemsize * sum(tensor.numel for tensor in shards.find(artifact).tensors().values())
    return need > SHARE * (memory.available_bytes() if device == "cpu" else available_on_gpu())


def available_on_gpu() -> int:
    """Return the bytes that this process may still take of its GPU."""
    free, total = torch.cuda.mem_get_info()
    return min(free, int(torch.cuda.get_per_process_memory_fraction() * total) - torch.cuda.memory_reserved())


class Streamed:
    """A model that is loaded from `artifact` anew, block by block, for each `run`."""

    def __init__(self, artifact: Path, dtype: torch.dtype, device: str, **options: Any) -> None:
        """Read the names of its tensors. Raises `UserError` where it cannot run block by block."""
        self.artifact = artifact
        self.parts = Blocks(artifact, dtype, device, **options)
        self.model = self.parts.model.eval()
        self.relay = Relay(len(self.parts.blocks))
        self.text = 0  # the number of the one that runs
        for number, block in enumerate(self.parts.blocks):
            block.forward = self._stop_before(number, block.forward)
        self.parts.load(REST)

    def _stop_before(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
            text = self.text
            self.relay.pause(number)
            self.text = text
            if number and not bool(hidden.sum().isfinite()):
                raise UserError(
                    f"{self.artifact}: text {text}: the states after block {number - 1} are not finite; the weights "
                    "are broken, or too large for this dtype"
                )
            return forward(hidden, *more, **named)

        return run

    def run(self, forwards: list[Callable[[], Any]]) -> list[Any]:
        """Run forwards of the model together, and return their results, one for each."""
        with ThreadPoolExecutor(1) as reader:
            coming: dict[int, Future] = {}

            def load(block: int) -> None:
                if block < 0:
                    self.parts.load(EMBEDDINGS)
                else:
                    coming.pop(block).result()
                if block + 1 < self.relay.count:
                    coming[block + 1] = reader.submit(self.parts.load, block + 1)
                elif not self.parts.tied:
                    self.parts.load(HEAD)

            def free(block: int) -> None:
                if block >= 0:
                    self.parts.free(block)
                elif not self.parts.tied:
                    self.parts.free(EMBEDDINGS)

            try:
                return self.relay.run(forwards, load, free)
            except ValueError as error:
                raise UserError(f"{self.artifact}: cannot run block by block ({error})") from None
            finally:
                for each in coming.values():
                    each.cancel()
