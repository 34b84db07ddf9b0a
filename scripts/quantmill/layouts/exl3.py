"""EXL3, ExLlamaV3's format: `trellis`, and the scales `suh` and `svh`, of each linear layer [outputs, inputs]; all else
as in the source. Sizes are padded with zeros to whole blocks of 128. A head that the model ties to its embeddings is
stored as a layer of its own.

The transposed matrix [inputs, outputs] lies in tiles of 16 by 16: trellis int16 [inputs / 16, outputs / 16, 16 * rate].
The 256 weights of a tile, in the order of a tensor core's registers, form a ring of bits, the highest bit of each word
of 32 first. Each weight adds `rate` bits (at a rate with a half, odd ones add one more than even ones). The 16 bits
that end with its own determine it: they are multiplied and folded into a number that looks normal (`_codebook`). A
tensor `mcg` or `mul1` selects the multiplication; without one it is QTIP's 3INST (arXiv:2406.11235).

The matrix is transformed by orthonormal Hadamard matrices of 128 on both sides. Then `suh` scales its inputs and `svh`
its outputs. From the format's description (doc/exl3.md of turboderp-org/exllamav3) and its kernels.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.checkpoint import EMBEDDINGS, HEAD, shards
from quantmill.checkpoint.shards import Checkpoint
from quantmill.layouts import Layer, Reading, Unread, read_layers

BLOCK, TILE = 128, 16
RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)  # bits a weight
# of mul1: what the sum is multiplied by, and added
HALVES = np.array([0x1EEE, 0xC931], "<u2").view("<f2").astype(np.float64)
PARTS = r"trellis|suh|svh|su|sv|mcg|mul1"


def packed_shapes(words: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """See `layouts`. Each layer's trellis has a rate of its own, which `check` reads."""
    outputs, inputs = map(_whole_blocks, shape)
    return {"suh": (inputs,), "svh": (outputs,)}


def check(layer: Layer) -> None:
    """Raise `Unread` if a layer's tensors do not fit its matrix, which the library's kernels do not check. The head is
    checked together with the embeddings, since a model that ties it does not name it."""
    if layer.matrix.name == EMBEDDINGS:
        layer = replace(layer, matrix=replace(layer.matrix, name=HEAD))
    trellis, shape = layer.tensor("trellis"), layer.matrix.shape
    if trellis is None and "suh" not in layer:
        return
    for part, expected in packed_shapes({}, shape).items():
        found = layer.tensor(part)
        if found is None or found.shape != expected or found.dtype != "F16":
            raise Unread(f"{layer.name}.{part} is not float16 of {list(expected)}")
    tiles = tuple(_whole_blocks(size) // TILE for size in reversed(shape))
    if trellis is None or trellis.dtype != "I16" or len(trellis.shape) != 3 or trellis.shape[:2] != tiles:
        raise Unread(
            f"{layer.name}.trellis is {trellis and list(trellis.shape)}, and the layer has {list(tiles)} tiles"
        )
    _rate(layer, trellis.shape[2])
    if "mul1" not in layer and trellis.shape[2] % TILE:
        raise Unread(f"{layer.name}: half bits need the codebook mul1")


def own_head(artifact: Path) -> bool:
    """See `layouts`."""
    return HEAD.replace("weight", "trellis") in shards.find(artifact).tensors()


def read(artifact: Path, source: Checkpoint) -> Reading:
    """See `layouts`. Raises `Unread` for unknown rates."""

    def weights(layer: Layer) -> np.ndarray:
        turned = _tiles(layer)
        inputs, outputs = turned.shape
        matrix = _hadamard() @ turned.reshape(-1, BLOCK, outputs)
        matrix = matrix.reshape(inputs, outputs) * layer.floats("suh")[:, None]
        matrix = (matrix.reshape(inputs, -1, BLOCK) @ _hadamard()).reshape(inputs, outputs) * layer.floats("svh")
        rows, columns = layer.matrix.shape
        return np.ascontiguousarray(matrix.T[:rows, :columns])

    return read_layers(artifact, source, ["trellis"], weights)


def _whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _rate(layer: Layer, words: int) -> float:
    """Return the bits a weight of a tile with this number of 16-bit words."""
    rate = words / TILE
    if rate not in RATES:
        raise Unread(f"{layer.name}: {rate:g} bits a weight")
    return rate


def _hadamard() -> np.ndarray:
    """Return Sylvester's matrix of 128, orthonormal; float32."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(np.sqrt(BLOCK))


def _order() -> np.ndarray:
    """Return the place in a tile, row after row, of each of its 256 weights in stored order: eight for each thread of a
    tensor core."""
    number = np.arange(256)
    thread, register = number >> 3, number & 7
    rows = (thread % 4) * 2 + (register & 1) + 8 * (register >> 1 & 1)
    columns = (thread >> 2) + 8 * (register >> 2)
    return rows * TILE + columns


def _tiles(layer: Layer) -> np.ndarray:
    """Return the turned matrix of a trellis, int16 [rows, columns, words], as float32 [16 * rows, 16 * columns]."""
    trellis = layer["trellis"]
    rows, columns, words = trellis.shape
    rate = _rate(layer, words)
    steps = np.full(256, int(rate))
    steps[1::2] += rate != int(rate)
    ends = np.cumsum(steps)
    kind = next((each for each in ("mcg", "mul1") if each in layer), "3inst")
    order = _order()
    matrix = np.empty((rows, TILE, columns, TILE), np.float32)
    window = (ends[:, None] + np.arange(-TILE, 0)) % (TILE * words)  # [256, 16] bits of the ring
    for number, row in enumerate(trellis):  # a row of tiles at a time: 16 bits of a weight are 16 bytes here
        ring = np.unpackbits(np.ascontiguousarray(row).view("<u4").astype(">u4").view("u1"), axis=1)
        states = np.packbits(ring[:, window], axis=2).view(">u2")[..., 0].astype(np.uint32)
        tiles = np.empty((columns, 256), np.float32)
        tiles[:, order] = _codebook(states, kind)
        matrix[number] = tiles.reshape(columns, TILE, TILE).swapaxes(0, 1)
    return matrix.reshape(rows * TILE, columns * TILE)


def _codebook(states: np.ndarray, kind: str) -> np.ndarray:
    """Return the weights of states, uint32 below 2**16, as float32 with float16's precision."""
    if kind == "mul1":  # the sum of a product's four bytes, shifted and scaled
        products = (states * np.uint32(0x83DCD12D)).astype("<u4")
        sums = np.ascontiguousarray(products).view("u1").reshape(*states.shape, 4).sum(axis=-1, dtype=np.float64)
        return ((sums + 1024) * HALVES[0] + HALVES[1]).astype(np.float16).astype(np.float32)
    factor, added = (0xCBAC1FED, 0) if kind == "mcg" else (89226354, 64248484)
    products = states * np.uint32(factor) + np.uint32(added)
    masked = (products & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
    halves = np.ascontiguousarray(masked.astype("<u4")).view("<f2").reshape(*states.shape, 2)
    return (halves[..., 0] + halves[..., 1]).astype(np.float32)  # two numbers of float16, added in it
