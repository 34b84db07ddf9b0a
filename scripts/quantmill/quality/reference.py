"""The reference's predictions over the scored positions, on the disk: hidden states with the model's head, or logits.

A folder holds `reference.json` and arrays, each as .npy. A hidden state is what the head reads; its logits are a
product away (`engines.head`). Logits are kept where the head is not all that follows the states, and where they are
small: then reading them is quicker than the product. They are float16, and each row is shifted so that its largest
logit is 0. That does not change a softmax, and gives likely tokens float16's best precision.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from quantmill import engines
from quantmill.common.program import UserError
from quantmill.engines.head import Head
from quantmill.quality import teacher_forcing

ROW_BLOCK = 2**18  # logits that are shifted at a time on a CPU
LOWEST = np.float32(np.finfo(np.float16).min)
SMALL = 2 * 2**30  # bytes of logits that a CPU keeps
AHEAD = 8  # chunks that a GPU works on while states of earlier ones are written
NAME = "reference.json"


def keeps_states(positions: int, vocab: int, device: str) -> bool:
    """Return whether hidden states are kept rather than logits: on a GPU the product is quicker than any disk, and on a
    CPU a few logits are read more quickly."""
    return device != "cpu" or logits_bytes(positions, vocab) > SMALL


def logits_bytes(positions: int, vocab: int) -> int:
    """Return the bytes of logits: float16."""
    return 2 * positions * vocab


def states_bytes(positions: int, vocab: int, hidden: int, device: str) -> int:
    """Return the bytes of hidden states and of the head, at most: float32 on a CPU, and 16 bits on a GPU."""
    return (positions + vocab) * hidden * (4 if device == "cpu" else 2)


class Writer:
    """Writes a reference's predictions into a new folder, chunk by chunk."""

    def __init__(self, folder: Path, positions: int, head: Head | None) -> None:
        """Begin a folder for this many positions. With a `head`, states are written, else logits."""
        self.folder, self.positions, self.head = folder, positions, head
        self.file: BinaryIO | None = None
        self.coming: list[Callable[[], np.ndarray]] = []  # states that a GPU still copies to the host
        folder.mkdir()

    def add(self, chunk: teacher_forcing.Chunk) -> None:
        """Write a chunk. Raises `UserError` before the first byte if the disk is too small for all."""
        if self.file is None:
            self._begin(chunk)
        assert self.file is not None
        if self.head:
            self.coming.append(copy_bits(chunk.states))
            self._write(0 if isinstance(chunk.states, np.ndarray) else AHEAD)
            return
        on_cpu = isinstance(chunk.logits, np.ndarray)
        size = max(1, ROW_BLOCK // chunk.logits.shape[1]) if on_cpu else len(chunk.logits)
        for low in range(0, len(chunk.logits), size):
            self.file.write(narrow(chunk.logits[low : low + size]).data)

    def _write(self, left: int) -> None:
        """Write states until only so many chunks are left."""
        while len(self.coming) > left:
            assert self.file is not None
            self.file.write(np.ascontiguousarray(self.coming.pop(0)()).data)

    def _begin(self, chunk: teacher_forcing.Chunk) -> None:
        vocab = chunk.logits.shape[1]
        facts: dict[str, Any] = {"positions": self.positions, "vocab_size": vocab}
        if self.head:
            arrays = {"weight": narrowest(bits_of(self.head.weight))}
            arrays |= {} if self.head.bias is None else {"bias": bits_of(self.head.bias)}
            dtype = str(chunk.states.dtype).removeprefix("torch.")
            facts |= {"scale": self.head.scale, "cap": self.head.cap, "dtype": dtype}
            row = bits_of(chunk.states[:1])
        else:
            arrays, row = {}, np.empty((1, vocab), np.float16)
        need = self.positions * row.nbytes + sum(each.nbytes for each in arrays.values())
        check_space(self.folder, need)
        for name, array in arrays.items():
            np.save(self.folder / f"{name}.npy", array)
        (self.folder / NAME).write_text(json.dumps(facts) + "\n", encoding="utf-8")
        shape = (self.positions, row.shape[1])
        self.file = (self.folder / f"{'states' if self.head else 'logits'}.npy").open("wb")
        description = {"descr": row.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, description)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.file:
            if error is None:
                self._write(0)
            self.file.close()


class Reference:
    """A reference's predictions, read in order, a few rows at a time."""

    def __init__(self, folder: Path) -> None:
        """Open what `Writer` wrote. Raises `UserError` if it is damaged."""
        self.folder, self.place = folder, 0
        try:
            self.facts = json.loads((folder / NAME).read_text(encoding="utf-8"))
            self.positions, self.vocab_size = (self.facts[name] for name in ("positions", "vocab_size"))
            # read, not mapped: a mapped file counts as the process's memory
            self.file = (folder / f"{'states' if 'dtype' in self.facts else 'logits'}.npy").open("rb", buffering=0)
            np.lib.format.read_magic(self.file)
            shape, _, self.dtype = np.lib.format.read_array_header_1_0(self.file)
        except (ValueError, KeyError, TypeError, OSError):
            raise self._damaged() from None
        self.width, self.start = shape[1], self.file.tell()
        if self.file.seek(0, 2) != self.start + self.positions * self.width * self.dtype.itemsize:
            raise self._damaged()
        self.head: Head | None = None
        self.made: Any = ()  # logits of states from row `first` on, of which `rows` returns the next ones
        self.first = 0
        self.raw, self.wide = np.empty(0, self.dtype), np.empty(0, np.float32)

    def rows(self, count: int, like: Any) -> Any:
        """Return the logits [count, vocab] of the next positions, valid until the next call: an array in float32 for an
        array, else a tensor on the device of the tensor `like`.

        Raises `UserError` if there are no more.
        """
        if self.place + count > self.positions:
            raise self._damaged()
        low, self.place = self.place, self.place + count
        if "dtype" in self.facts:
            return self._products(low, count, like)
        rows = self._read(low, count, like)
        if not isinstance(like, np.ndarray):
            return rows.float()
        if rows.size > self.wide.size:
            self.wide = np.empty(rows.size, np.float32)
        return widen(rows, self.wide[: rows.size].reshape(rows.shape))

    def _read(self, low: int, count: int, like: Any) -> Any:
        """Return stored rows: a tensor on the device of the tensor `like`, else an array, which the next call
        overwrites."""
        if isinstance(like, np.ndarray):
            if count * self.width > self.raw.size:
                self.raw = np.empty(count * self.width, self.dtype)
            rows = self.raw[: count * self.width].reshape(count, self.width)
            self._fill(rows, low)
            return rows
        torch = sys.modules["torch"]
        room = torch.empty((count, self.width), dtype=getattr(torch, self.dtype.name), pin_memory=like.is_cuda)
        self._fill(room.numpy(), low)
        return room.to(like.device, non_blocking=True)  # from pinned memory: the host goes on

    def _fill(self, rows: np.ndarray, low: int) -> None:
        self.file.seek(self.start + low * rows[0].nbytes)
        if self.file.readinto(rows.reshape(-1).view(np.uint8).data) != rows.nbytes:
            raise self._damaged()

    def _products(self, low: int, count: int, like: Any) -> Any:
        """Return rows that the head makes of states. A CPU makes as many at a time as fit a chunk, because a product of
        few rows reads the whole head too."""
        if self.head is None:
            arrays = {name: self._array(name, like) for name in ("weight", "bias")}
            self.head = Head(**arrays, scale=self.facts["scale"], cap=self.facts["cap"])
        if low + count > self.first + len(self.made):
            self.made = ()  # free it before the next ones are there
            least = engines.chunk_positions(self.vocab_size) if isinstance(like, np.ndarray) else 0
            size = min(max(count, least), self.positions - low)
            made = self.head.logits(read_bits(self._read(low, size, like), self.facts["dtype"], like))
            self.made, self.first = made, low
        return self.made[low - self.first : low - self.first + count]

    def _array(self, name: str, like: Any) -> Any:
        path = self.folder / f"{name}.npy"
        return read_bits(np.load(path), self.facts["dtype"], like) if path.exists() else None

    def _damaged(self) -> UserError:
        return UserError(f"{self.folder}: the reference's predictions are damaged; build them again")


def check_space(folder: Path, need: int) -> None:
    """Raise `UserError` if a folder's disk is too small for this many bytes."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise UserError(
            f"{folder}: the reference's predictions take {need / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; free "
            "some disk, or score a shorter evaluation text"
        )


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


def narrowest(weights: np.ndarray) -> np.ndarray:
    """Return weights in float16 if that holds them all, as those of a float16 artifact."""
    if weights.dtype != np.float32:
        return weights
    half = weights.astype(np.float16)
    return half if np.array_equal(half, weights) else weights


def bits_of(tensor: Any) -> np.ndarray:
    """Return a tensor as an array on the host; numpy has no bfloat16, whose bits become uint16."""
    if isinstance(tensor, np.ndarray):
        return tensor
    tensor = tensor.detach().cpu().contiguous()
    torch = sys.modules["torch"]
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def copy_bits(tensor: Any) -> Callable[[], np.ndarray]:
    """Begin to copy a tensor to the host, and return what waits for `bits_of` it. The GPU is not waited for."""
    if isinstance(tensor, np.ndarray) or not tensor.is_cuda:
        return lambda: bits_of(tensor)
    host, done = tensor.to("cpu", non_blocking=True), sys.modules["torch"].cuda.Event()
    done.record()

    def wait() -> np.ndarray:
        done.synchronize()
        return bits_of(host)

    return wait


def read_bits(bits: Any, dtype: str, like: Any) -> Any:
    """Return what `bits_of` wrote, an array or tensor: a tensor of `dtype` on the device of a tensor `like`, or float32
    on the host, as a tensor if torch is loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return (bits.astype(np.uint32) << 16).view(np.float32) if bits.dtype == np.uint16 else np.float32(bits)
    tensor = torch.from_numpy(bits) if isinstance(bits, np.ndarray) else bits
    tensor = tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
    return tensor.float() if isinstance(like, np.ndarray) else tensor.to(like.device, getattr(torch, dtype))
