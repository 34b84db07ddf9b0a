"""One module an engine, all with the same contract; the rest of Quantmill knows engines by this contract alone.

An engine's module holds a class `Engine` and imports its libraries; it is imported inside its own environment.
"""

import importlib
import importlib.util
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from common.program import UserError, first_line

# float32 values in one chunk of logits: 40 MiB. glibc's malloc gives more than 32 MiB back at once, and kept a little
# less than that four times over
CHUNK_LOGITS = 10 * 2**20


class CannotDecode(UserError):
    """An engine's other way to decode that this model does not take, found when it was tried."""


class Engine(Protocol):
    """A loaded artifact on a device."""

    compute_type: str  # what it really calculates in, asked of the library
    modes: tuple[str, ...]  # how it can decode this artifact on this device, the plain way first
    mode: str  # the one in use, `modes[0]` at first; setting it chooses another
    stop_ids: list[int]  # tokens that end a sequence, which it never chooses

    def __init__(self, artifact: Path, device: str, threads: int) -> None:
        """Load `artifact` on `device` (`cpu` or `cuda`) with `threads` CPU threads.

        Raises `UserError` where the device or the artifact does not fit.
        """

    def prefill_decode(self, ids: list[int], n: int) -> Iterator[tuple[int, float]]:
        """Yield `n` greedy token ids after the prompt `ids`, each with `time.perf_counter()` of its time on the host.

        The engine stamps the time, because only it knows: a token that another thread has to hand over can wait for
        that thread. End-of-sequence tokens are never chosen, so that every engine decodes the same number of tokens.
        Raises `CannotDecode` where the mode in use, not the plain one, turns out not to fit the model.
        """

    def logits(self, ids: list[int]) -> Iterator[np.ndarray]:
        """Yield float32 logits in chunks [positions, vocab] that together cover every position of `ids`, in order.

        In numpy's arrays; on a GPU, an engine that has torch yields tensors there, and they are compared there.
        """

    def weight_bytes(self) -> int:
        """Bytes of weights that one decoded token reads, as loaded (of an untied embedding table it reads one row)."""

    def versions(self) -> dict[str, str]:
        """The libraries and kernels in use."""

    def close(self) -> None:
        """Give the memory back."""

    # An engine may also have these two; the others' rows say that they have none.

    def decode_batch(self, prompts: list[list[int]], n: int) -> Iterator[tuple[list[int], float]]:
        """As `prefill_decode` for prompts of the same length at once, the plain way: the tokens of all, step by step.

        The time of a step is when the last of its tokens was on the host.
        """

    def peak_allocated_bytes(self) -> int | None:
        """Most memory of the GPU that the library's allocator has handed out; None on a CPU."""


def module(name: str) -> ModuleType:
    """Import engine `name`: the module of that name, `-` as `_`. Raises `UserError` where there is none."""
    file = name.replace("-", "_")
    if importlib.util.find_spec(f"engines.{file}") is None:
        raise UserError(f"engine {name!r}: there is no scripts/engines/{file}.py")
    return importlib.import_module(f"engines.{file}")


def load(name: str, artifact: Path, device: str, threads: int, **changes: str) -> Engine:
    """Load `artifact` with engine `name`; `changes`: a `dtype` that `other_dtype` named.

    Raises `UserError` with the artifact's name for whatever the engine's libraries raise, now and when it runs.
    """
    kind = module(name).Engine
    with one_line(name, artifact):
        engine = kind(artifact, device, threads, **changes)
    for method in ("prefill_decode", "decode_batch", "logits"):
        if hasattr(engine, method):
            setattr(engine, method, _guard(getattr(engine, method), name, artifact))
    return engine


@contextmanager
def one_line(name: str, artifact: Path) -> Iterator[None]:
    """Raise as a `UserError` whatever an engine raises. What our own lines raised stays its cause, which the program's
    log shows: that may be a fault of theirs, where a library's is what it thinks of the artifact."""
    try:
        yield
    except (UserError, OSError, MemoryError):  # a line of their own
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = Path(last.filename)
        ours = place.is_relative_to(Path(__file__).resolve().parents[1])
        said = f"{type(error).__name__}: {first_line(error)}; {place.name} line {last.lineno}"
        raise UserError(f"{artifact}: {name} fails on it ({said})") from (error if ours else None)


def _guard(call: Callable[..., Iterator[Any]], name: str, artifact: Path) -> Callable[..., Iterator[Any]]:
    """An engine's method, whose failures are one line; the engine stamps the time of each token itself."""

    def run(*inputs: Any) -> Iterator[Any]:
        with one_line(name, artifact):
            yield from call(*inputs)

    return run


def other_dtype(name: str, device: str) -> str | None:
    """The dtype that engine `name` can calculate in besides its own, for the noise floor; None where there is none.

    Such an engine has a table OTHER_DTYPES (device -> dtype), and its class takes `dtype`.
    """
    return getattr(module(name), "OTHER_DTYPES", {}).get(device)


def chunk_positions(vocab_size: int) -> int:
    """Positions in one chunk of logits: `CHUNK_LOGITS` values, at least 16 positions and at most 512."""
    return min(512, max(16, CHUNK_LOGITS // vocab_size))
