"""Weights rounded to ggml's types: its library quantizes, its Python package dequantizes."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from quantmill import llamacpp
from quantmill.checkpoint.ggml_types import TYPES

NUMBERS = {stored.name: number for number, stored in TYPES.items()}
WANT_IMPORTANCE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")  # impossible, or garbage, without it
CHUNK = 2**18  # weights that a thread takes at a time


@cache
def library() -> ctypes.CDLL:
    """Load the library that quantizes."""
    found = ctypes.CDLL(str(llamacpp.folder() / "bin/libggml-base.so"))
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    found.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    found.ggml_quantize_chunk.restype = ctypes.c_size_t
    return found


def fits(type_: str, columns: int) -> bool:
    """Return whether rows of `columns` weights can be stored as a type."""
    return columns % TYPES[NUMBERS[type_]].block == 0


def nbytes(type_: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of this shape as a type."""
    stored = TYPES[NUMBERS[type_]]
    return int(np.prod(shape)) // stored.block * stored.nbytes


def round_trip(weights: np.ndarray, type_: str, importance: np.ndarray | None, threads: int) -> np.ndarray:
    """Quantize float32 weights [rows, columns] to a type and dequantize them.

    importance: float32 [columns], a column's weight in the squared error; None: all equal. Rows are quantized
    independently of each other. Weights of experts are [experts, rows, columns], and importance [experts, columns].
    """
    if weights.ndim == 3:
        each = importance if importance is not None else [None] * len(weights)
        return np.stack([round_trip(one, type_, own, threads) for one, own in zip(weights, each, strict=True)])
    rows, columns = weights.shape
    size = max(1, CHUNK // columns)
    out = np.empty((rows, columns), np.float32)
    given = None if importance is None else np.ascontiguousarray(importance, np.float32)
    pointer = None if given is None else given.ctypes.data
    number, lib = NUMBERS[type_], library()
    gguf: Any = llamacpp.gguf()

    def one(low: int) -> None:
        part = np.ascontiguousarray(weights[low : low + size], np.float32)
        raw = np.empty((len(part), nbytes(type_, (columns,))), np.uint8)
        written = lib.ggml_quantize_chunk(number, part.ctypes.data, raw.ctypes.data, 0, len(part), columns, pointer)
        assert written == raw.nbytes
        out[low : low + size] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number))

    with ThreadPoolExecutor(threads) as workers:
        list(workers.map(one, range(0, rows, size)))
    return out
