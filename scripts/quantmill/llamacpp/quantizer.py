"""llama-quantize: its plan for a file, and the file that gives it each tensor's type."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from quantmill import llamacpp
from quantmill.checkpoint import gguf_file
from quantmill.common import manifest
from quantmill.common.program import UserError
from quantmill.llamacpp import files, ggml, mixture

IMATRIX = "imatrix.gguf"
LINE = re.compile(r"^\[ *\d+/ *\d+\] (\S+) .* MiB -> .* MiB \((\w+)\)$", re.MULTILINE)
READS_STATE = re.compile(r"blk\.\d+\.ffn_(up|gate_up)_exps\.weight")  # of a layer's experts; the others count the same
UP = 32  # bytes; llama-quantize pads each tensor to a multiple
KEYS = 1024  # bytes of metadata that it adds at most: the importance matrix's path and two numbers


def plan(base: Path, type_: str, imatrix: Path | None) -> dict[str, str]:
    """Return the tensors that llama-quantize would quantize for a file's type, and the type of each.

    base: a GGUF file that is not quantized. Nothing is written. Raises `UserError` if it would quantize none.
    """
    matrix = ["--imatrix", imatrix / IMATRIX] if imatrix else []
    said = llamacpp.call("llama-quantize", *matrix, "--dry-run", base, type_)
    found = {name: stored.upper() for name, stored in LINE.findall(said)}
    if not found:
        raise UserError(f"{base}: llama-quantize would store none of its tensors as {type_}")
    return found


def mix(base: Path, imatrix: Path, sensitivity: Path, type_: str, nbytes: int | None) -> dict[str, mixture.Choice]:
    """Choose each tensor's type, with its bytes and divergence.

    Args:
        base, imatrix: artifacts, the first as f16.
        sensitivity: what build.gguf_sensitivity wrote of them.
        type_, nbytes: the file's largest size: that of a type, or this many bytes.

    Raises `UserError` if the measurements are of another model or matrix, or if the bytes are too few.
    """
    found = json.loads(sensitivity.read_text(encoding="utf-8"))
    if found["imatrix_sha256"] != manifest.read(imatrix)["files"][IMATRIX]["sha256"]:
        raise UserError(f"{sensitivity}: was measured with another importance matrix than {imatrix}; measure it again")
    content = gguf_file.read_all(files.first(base))
    planned = plan(content.path, type_, imatrix)
    if planned.keys() != found["tensors"].keys():
        raise UserError(f"{sensitivity}: was measured on another model than {base}; measure it again")
    tensors = {
        name: [mixture.Choice(stored, padded(entry["bytes"]), entry["kld"]) for stored, entry in types.items()]
        for name, types in found["tensors"].items()
    }
    budget = sum(padded(ggml.nbytes(planned[name], content.tensors[name].shape)) for name in tensors)
    if nbytes is not None:
        rest = content.path.stat().st_size - sum(padded(content.tensors[name].nbytes) for name in tensors)
        budget = nbytes - rest - KEYS
    return mixture.choose(tensors, budget)


def padded(nbytes: int) -> int:
    """Bytes that a tensor takes in a file."""
    return -(-nbytes // UP) * UP


def type_lines(chosen: Mapping[str, mixture.Choice]) -> str:
    """Return the content of --tensor-type-file: in every line a pattern of a whole name, and its type."""
    return "".join(f"^{re.escape(name)}$={choice.type.lower()}\n" for name, choice in chosen.items())


def importance(imatrix: Path) -> dict[str, np.ndarray]:
    """Map tensors to the mean square of each column's inputs, float32 [columns], as llama-quantize reads them.

    Of experts, which share a tensor, it is [experts, columns]. For one that no token reached all columns are equal.
    """
    found = {}
    for tensor, sums, counts in _sums(imatrix):
        means = sums / np.maximum(counts, 1)[:, None]
        means[counts == 0] = 1
        found[tensor] = means if len(counts) > 1 else means[0]
    return found


def expert_tokens(imatrix: Path) -> tuple[dict[str, list[int]], int]:
    """Return the tokens that each expert saw, by the tensor of its layer, and the width of a token's state.

    The names are empty for a model without experts.
    """
    tokens, width = {}, 0
    for tensor, sums, counts in _sums(imatrix):
        if READS_STATE.fullmatch(tensor):
            tokens[tensor], width = counts.astype(int).tolist(), sums.shape[1]
    return tokens, width


def _sums(imatrix: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield each tensor's sums of squares of its inputs, float32 [experts or 1, columns], and tokens of each."""
    tensors = gguf_file.read(imatrix / IMATRIX).tensors
    for name, record in tensors.items():
        tensor = name.removesuffix(".in_sum2")
        if tensor != name:
            yield tensor, _floats(record).reshape(-1, record.shape[-1]), _floats(tensors[f"{tensor}.counts"])


def _floats(record: gguf_file.Tensor) -> np.ndarray:
    return np.fromfile(record.path, np.float32, record.nbytes // 4, offset=record.offset)
