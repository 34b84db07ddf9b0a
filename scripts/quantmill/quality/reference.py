"""The reference's logits over the scored positions, read in order: from a file, or from a process that computes them.

They are one .npy array [scored positions, vocab] of float16. Each row is shifted so that its largest logit is 0. That
does not change a softmax, and gives likely tokens float16's best precision.
"""

import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantmill.common.program import UserError, start_child
from quantmill.engines import Engine
from quantmill.quality import teacher_forcing

ROW_BLOCK = {"cpu": 2**18, "gpu": 2**23}  # logits that are shifted at a time
LOWEST = np.float32(np.finfo(np.float16).min)


class EndedError(UserError):
    """The logits end before the text does."""


class Logits:
    """An array of logits, read in order, a few rows at a time into the same memory."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        """Read the array's header. Raises `EndedError` if there is none."""
        self.stream = stream
        try:
            np.lib.format.read_magic(stream)
            (self.positions, self.vocab_size), _, self.dtype = np.lib.format.read_array_header_1_0(stream)
        except ValueError:
            raise EndedError("the reference's logits have no header; build them again") from None
        self.raw, self.wide = np.empty(0, self.dtype), np.empty(0, np.float32)

    def rows(self, count: int) -> np.ndarray:
        """Return the next rows [count, vocab], valid until the next call. Raises `EndedError` if there are no more."""
        size = count * self.vocab_size
        if size > self.raw.size:
            self.raw = np.empty(size, self.dtype)
        rows = self.raw[:size]
        if self.stream.readinto(rows.view(np.uint8).data) != rows.nbytes:
            raise EndedError("the reference's logits end too early; build them again")
        return rows.reshape(count, self.vocab_size)

    def wide_rows(self, count: int) -> np.ndarray:
        """Return the next rows in float32, for numpy."""
        rows = self.rows(count)
        if rows.dtype != np.float16:
            return rows
        if rows.size > self.wide.size:
            self.wide = np.empty(rows.size, np.float32)
        return widen(rows, self.wide[: rows.size].reshape(rows.shape))


def check_space(folder: Path, positions: int, vocab_size: int) -> None:
    """Raise `UserError` if a folder's disk is too small for the logits."""
    need, free = positions * vocab_size * 2, shutil.disk_usage(folder).free
    if need > free:
        raise UserError(
            f"{folder}: reference logits take {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; free some disk, "
            "set reference_logits: recompute, or score a shorter evaluation text"
        )


def write(engine: Engine, text: teacher_forcing.Text, file: BinaryIO, folder: Path | None) -> None:
    """Write the array. Raises `UserError` before the first byte if the disk of `folder` is too small for it."""
    started = False
    for chunk in teacher_forcing.chunks(engine, text):
        vocab_size = chunk.logits.shape[1]
        if not started:
            if folder:
                check_space(folder, text.positions, vocab_size)
            description = {"descr": "<f2", "fortran_order": False, "shape": (text.positions, vocab_size)}
            np.lib.format.write_array_header_1_0(file, description)
            started = True
        size = max(1, ROW_BLOCK["cpu" if isinstance(chunk.logits, np.ndarray) else "gpu"] // vocab_size)
        for low in range(0, len(chunk.logits), size):
            file.write(narrow(chunk.logits[low : low + size]).data)
        del chunk  # free it before the engine makes the next one


def narrow(logits: Any) -> np.ndarray:
    """Round float32 logits to float16, shifted so that a row's largest is 0.

    Logits below float16's lowest number become that number: exp of it is 0, and 0 times infinity would be NaN. A tensor
    is rounded on its device, which halves the copy to the host. An array is rounded by torch if that is loaded: numpy's
    cast takes as long as a small model.
    """
    torch = sys.modules.get("torch")
    if not isinstance(logits, np.ndarray):
        shifted = (logits - logits.amax(dim=-1, keepdim=True)).clamp_(min=float(LOWEST))
        return teacher_forcing.to_host(shifted.half())
    shifted = np.maximum(logits - logits.max(axis=-1, keepdims=True), LOWEST)
    return torch.from_numpy(shifted).half().numpy() if torch else shifted.astype(np.float16)


def widen(rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Convert float16 rows, all at most 0, to float32 in `out`.

    It shifts their bits, four times as fast as numpy's cast: 13 more bits of the fraction, and an exponent whose bias
    is 112 larger. An infinity becomes -65536, whose exp is 0 too.
    """
    bits = out.view(np.uint32)
    np.bitwise_and(rows.view(np.uint16), np.uint16(0x7FFF), out=bits)
    bits <<= 13
    out *= np.float32(-(2.0**112))
    return out


@contextmanager
def load(path: Path) -> Iterator[Logits]:
    """Open the file that `write` wrote."""
    with path.open("rb") as file:
        yield Logits(file)


@contextmanager
def recompute(command: list[str]) -> Iterator[Logits]:
    """Start a program that writes the logits to its standard output, and yield them as they come.

    Raises `UserError` with its last error line if it fails.
    """
    with (
        tempfile.TemporaryFile() as errors,
        start_child(command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        try:
            yield Logits(process.stdout)  # type: ignore[arg-type]  # a pipe of bytes, as asked for
        except EndedError:
            if process.wait() == 0:
                raise
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise UserError(f"the reference's process failed: {lines[-1].removeprefix('error: ')}") from None
