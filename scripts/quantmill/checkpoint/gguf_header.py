"""The header of a GGUF file, front to back: texts, numbers, arrays and names, each checked before it is read.

All is little-endian. A text is its length and its bytes. An array is the type and the number of its elements, followed
by them. Memory stays within a few times the header's size, which is bounded.
"""

import os
import struct
from array import array
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantmill.common.program import UserError

MAX_BYTES = 64 * 2**20  # 262,144 tokens and their 514,906 merges take 16 MB
MAX_TEXT = 2**20  # bytes of a text in an array, and of all others together; chat templates have up to 40,000
CHUNK = 2**20  # bytes that are read at a time

NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
BOOL, TEXT, ARRAY = 7, 8, 9
# keys of which ggml refuses other types, or llama.cpp aborts on them
KINDS = {
    "general.alignment": 4,
    "general.architecture": TEXT,
    "split.no": 2,
    "split.count": 2,
    "split.tensors.count": 5,
}


class Texts(Sequence[str]):
    """An array of texts, each decoded on access. As Python objects, the tokens of a hostile file would fill memory."""

    def __init__(self, data: bytearray, starts: array) -> None:
        """Keep `data`, the header, and `starts`, where each text's length stands in it."""
        self._data, self._starts = data, starts

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        start = self._starts[index]
        (length,) = struct.unpack_from("<Q", self._data, start)
        return self._data[start + 8 : start + 8 + length].decode()


class Header:
    """A file's first bytes, `data`, read on demand; `position` follows what was read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.data = bytearray()
        self.position = 0
        self.left = MAX_TEXT

    def refuse(self, reason: str) -> UserError:
        """Return an error that names the file."""
        return UserError(f"{self.path}: {reason}")

    def skip(self, count: int) -> int:
        """Load the next `count` bytes into `data` and advance past them. Return where they start. Raises `UserError` if
        the file ends before, or the header exceeds its bound."""
        start, end = self.position, self.position + count
        if end > len(self.data):
            if end > self.size:
                raise self.refuse(f"is cut off: it has {self.size} bytes, and its header needs more; download it again")
            if end > MAX_BYTES:
                raise self.refuse(f"its metadata goes beyond {MAX_BYTES >> 20} MiB, which no model's does; refused")
            while len(self.data) < end:
                piece = self.file.read(CHUNK)
                if not piece:
                    raise EOFError(f"{self.path} has become shorter while it was read")
                self.data += piece
        self.position = end
        return start

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """Read the next values; `layout` as in `struct`."""
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))

    def text(self, what: str, limit: int) -> str:
        """Read a text of at most `limit` bytes. Raises `UserError` for a longer one, and for bytes that are not
        UTF-8."""
        (length,) = self.unpack("<Q")
        if length > limit:
            raise self.refuse(f"{what} is {length} bytes long, and {limit} are the most; refused")
        start = self.skip(length)
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError:
            raise self.refuse(f"{what} is not UTF-8; download it again") from None

    def name(self, what: str, limit: int, taken: Container[str]) -> str:
        """Read the name of a key or a tensor, which is not `taken`. C ends names at a NUL, so two of ours could be one
        there."""
        name = self.text(f"the name of a {what}", limit)
        if not name or not name.isascii() or not name.isprintable():
            raise self.refuse(f"a {what} is called {name!a:.80}; refused")
        if name in taken:
            raise self.refuse(f"the {what} {name:.80} occurs twice; only one of them can be right")
        return name

    def value(self, key: str) -> Any:
        """Read the value of a key: int, float, bool, str, a numpy array or `Texts`. llama.cpp reads no arrays of
        arrays."""
        (kind,) = self.unpack("<I")
        if kind != KINDS.get(key, kind):
            raise self.refuse(f"the type of {key} is {kind}, and has to be {KINDS[key]}; convert the model again")
        if kind == TEXT:
            start = self.position + 8
            found = self.text(key, self.left)
            self.left -= self.position - start
            return found
        if kind in NUMBERS:
            return self.numbers(key, kind, 1)[0].item()
        if kind != ARRAY:
            raise self.refuse(f"{key} is of the unknown type {kind}; refused")
        kind, count = self.unpack("<IQ")
        if kind == TEXT:
            return self.texts(key, count)
        if kind not in NUMBERS:
            what = "arrays, which llama.cpp does not read" if kind == ARRAY else f"the unknown type {kind}"
            raise self.refuse(f"{key} is an array of {what}; refused")
        return self.numbers(key, kind, count)

    def numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        """Read an array [count] of numbers of a type."""
        dtype = np.dtype("u1" if kind == BOOL else NUMBERS[kind])
        start = self.skip(count * dtype.itemsize)
        found = np.frombuffer(self.data[start : self.position], dtype)
        if kind == BOOL and found.max(initial=0) > 1:
            raise self.refuse(f"{key} is a boolean that is neither 0 nor 1; download it again")
        return found.view(bool) if kind == BOOL else found

    def texts(self, key: str, count: int) -> Texts:
        """Read an array of texts."""
        self.position = self.skip(8 * count)  # their lengths alone take these bytes
        starts = array("I", [0]) * count
        data, empty = self.data, bytes(8)
        for number in range(count):  # up to 8 million times in a hostile file
            starts[number] = start = self.position
            if (head := data[start : start + 8]) == empty:
                self.position += 8
                continue
            end = start + 8 + int.from_bytes(head, "little")
            if end <= len(data) and end - start <= MAX_TEXT and data[start + 8 : end].isascii():
                self.position = end
            else:
                self.text(f"{key}[{number}]", MAX_TEXT)
        return Texts(self.data, starts)
