"""A model whose blocks are loaded one after the other, each for all texts."""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from quantmill.common.program import UserError
from quantmill.engines.streamed import free_memory, shelf
from quantmill.engines.streamed.blocks import EMBEDDINGS, HEAD, REST, Blocks
from quantmill.engines.streamed.relay import Relay

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of mallopt(3)


def keep_no_freed_memory() -> None:
    """Let malloc return what is freed to the system. By itself glibc keeps an arena for each thread, and a heap whose
    holes no weights of another shape fill: 12 blocks of 36 instead of 3."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)
        libc.mallopt(M_MMAP_THRESHOLD, 2**20)


def alone(tensor: torch.Tensor) -> bool:
    """Return whether nothing but this tensor is in its memory."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


class Streamed:
    """A model that is loaded from `artifact` anew, block by block, for each `run`."""

    def __init__(self, artifact: Path, dtype: torch.dtype, device: str, **options: Any) -> None:
        """Read the names of its tensors. Raises `UserError` where it cannot run block by block."""
        keep_no_freed_memory()
        transformers.logging.disable_progress_bar()  # of each part
        self.artifact = artifact
        self.parts = Blocks(artifact, dtype, device, **options)
        self.model = self.parts.model.eval()
        self.relay = Relay(len(self.parts.blocks))
        self.text = 0  # number of the one that runs
        self.on_disk = False  # whether states wait there
        for number, block in enumerate(self.parts.blocks):
            block.forward = self._stop_before(number, block.forward)
        self.parts.load(REST)

    def _stop_before(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
            text, waiting = self.text, self.relay.current and self.on_disk and alone(hidden)
            if waiting:
                take, room = shelf.put(hidden), hidden.untyped_storage()
                size = room.nbytes()
                room.resize_(0)  # the model's own frame holds the tensor
            self.relay.pause(number)
            self.text = text
            if waiting:
                room.resize_(size)
                hidden.copy_(take())
            if number and not bool(hidden.sum(dtype=torch.float32).isfinite()):
                raise UserError(
                    f"{self.artifact}: window {text}: the states after block {number - 1} are not finite; the weights "
                    "are broken, or too large for this dtype"
                )
            return forward(hidden, *more, **named)

        return run

    def choose_place(self, tokens: int) -> None:
        """Let the states of `tokens` tokens wait on the disk if they are more than half of the free memory. Raises
        `UserError` if the disk is too small."""
        size = self.model.dtype.itemsize * self.model.config.get_text_config().hidden_size * tokens
        if self.on_disk or 2 * size > free_memory.available(self.parts.device):
            shelf.check_space(size)
            self.on_disk = True

    def run(self, forwards: list[Callable[[], Any]]) -> list[Any]:
        """Run forwards of the model together, and return their results, one for each. Raises `UserError` for weights
        that cannot be loaded, states that are not finite, and a model that does not run its blocks in order."""

        def begin(text: int) -> Any:
            self.text = text
            return forwards[text]()

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
                return self.relay.run([partial(begin, text) for text in range(len(forwards))], load, free)
            except ValueError as error:
                raise UserError(f"{self.artifact}: cannot run block by block ({error})") from None
            finally:
                for each in coming.values():
                    each.cancel()
