"""Measure a model's sensitivity to the type of each tensor, for gguf-mixed.

    python scripts/quantmill build.gguf_sensitivity SRC OUT --base GGUF-F16 --imatrix IMATRIX
        --calibration calibration.json --evaluation evaluation.json

Each matrix that llama-quantize would quantize is rounded to the type PROBE, one at a time, and transformers measures
the KL divergence of the model's predictions in float32, on a few windows of the calibration text. For other types the
divergence is PROBE's times the ratio of their squared errors, weighted by the importance matrix: for small changes, the
divergence is proportional to that error. OUT is a JSON file with bytes and divergence of each tensor and type, and
`checks`, which compare some estimates with measurements.

This works for models whose matrices llama.cpp stores unchanged up to the order of rows. The experts of a layer, which
it keeps in one tensor, are rounded together.
"""

import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from tqdm import tqdm

from quantmill import devices, llamacpp
from quantmill.build.quantizer import calibration
from quantmill.checkpoint import gguf_file
from quantmill.common import manifest
from quantmill.common.atomic import write_json
from quantmill.common.program import UserError, parser
from quantmill.llamacpp import files, ggml, quantizer
from quantmill.llamacpp.sensitivity import Model

PROBE = "IQ4_NL"  # fits rows of whole blocks of 32, and its errors are typical of a good choice
# The best of ggml's types of each size; Q4_1, between IQ4_NL and Q5_0, is not worth its bytes
CANDIDATES = (
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL", "Q4_K", "Q5_0", "Q5_K", "Q5_1"),
    *("Q6_K", "Q8_0"),
)
WINDOWS, TOKENS = 2, 512  # that the divergence is measured on
ROWS = 32  # of a matrix, from which a type's squared error is estimated
CHECKS = 4  # tensors, of which two estimates each are compared with measurements


def parameters_of(model: Model, base: gguf_file.Gguf, wanted: list[str]) -> dict[str, str]:
    """Map each wanted tensor of the file to the model's parameter.

    Raises `UserError` for a tensor that is not one of the model's matrices, up to the order of rows.
    """
    gguf = llamacpp.gguf()
    architecture = base.metadata["general.architecture"]
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], base.metadata[f"{architecture}.block_count"])
    every = (*model.matrices, *model.experts)
    found = {f"{names.get_name(name.removesuffix('.weight'))}.weight": name for name in every}
    for tensor in wanted:
        if tensor not in found or not model.settle(found[tensor], partial(same_columns, base.tensors[tensor])):
            raise UserError(
                f"{base.path}: {tensor} is not a matrix of transformers' model; leave gguf-mixed out for this model"
            )
    return {tensor: found[tensor] for tensor in wanted}


def same_columns(record: gguf_file.Tensor, matrix: np.ndarray) -> bool:
    """Return whether a tensor of the file (float16) equals a matrix, up to the order of rows."""
    if record.shape != matrix.shape or record.type != "F16":
        return False
    stored = np.memmap(record.path, np.float16, "r", record.offset, record.shape)
    theirs, ours = (np.square(each, dtype=np.float32).sum(axis=-2) for each in (stored, matrix))
    return np.allclose(ours, theirs, rtol=1e-2, atol=1e-3 * ours.max())


def candidates(columns: int, importance: np.ndarray | None) -> list[str]:
    """Return the types that fit rows of `columns` weights."""
    possible = CANDIDATES if importance is not None else [t for t in CANDIDATES if t not in ggml.WANT_IMPORTANCE]
    return [type_ for type_ in possible if ggml.fits(type_, columns)]


def measure(model: Model, name: str, importance: np.ndarray | None, threads: int) -> dict[str, dict[str, float]]:
    """Estimate the bytes and the divergence of each type for a matrix, or a layer's experts, from one measurement."""
    weights = model.weights(name)
    count = max(1, ROWS // len(weights)) if weights.ndim == 3 else ROWS
    sample = weights[..., np.unique(np.linspace(0, weights.shape[-2] - 1, count).astype(int)), :]

    def error(type_: str) -> float:
        squares = np.square(ggml.round_trip(sample, type_, importance, threads) - sample).sum(axis=-2, dtype=np.float64)
        return float(squares.sum() if importance is None else (squares * importance).sum())

    kld = model.divergence(name, ggml.round_trip(weights, PROBE, importance, threads))
    unit = error(PROBE) or 1.0
    return {
        type_: {"bytes": ggml.nbytes(type_, weights.shape), "kld": kld * error(type_) / unit}
        for type_ in candidates(weights.shape[-1], importance)
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("src", type=Path, help="folder of the canonical safetensors")
    arguments.add_argument("out", type=Path, help="JSON file to write")
    arguments.add_argument("--base", type=Path, required=True, help="build.gguf's artifact of the type f16")
    arguments.add_argument("--imatrix", type=Path, required=True, help="what build.imatrix wrote")
    calibration.add_arguments(arguments, sizes=False)
    arguments.add_argument("--seed", type=int, default=0, help="for the choice of windows")
    devices.add_arguments(arguments)
    options = arguments.parse_args()

    started = time.monotonic()
    origin = manifest.read_checked(options.src)
    manifest.read_checked(options.base)
    device = devices.resolve(options.device)
    base = gguf_file.read_all(files.first(options.base))
    wanted = list(quantizer.plan(base.path, PROBE.lower(), None))
    importance = quantizer.importance(options.imatrix)
    windows = calibration.read(
        options.calibration, options.evaluation, samples=WINDOWS, sequence_length=TOKENS, seed=options.seed
    )
    model = Model(options.src, device, options.threads, windows.samples)
    names = parameters_of(model, base, wanted)
    found = {
        tensor: measure(model, name, importance.get(tensor), options.threads)
        for tensor, name in tqdm(names.items(), desc="tensors", mininterval=1)
    }

    checks, wrong = [], []
    for tensor in list(names)[:: -(-len(names) // CHECKS)]:
        types = list(found[tensor])
        for type_ in (types[len(types) // 4], types[3 * len(types) // 4]):
            weights = model.weights(names[tensor])
            changed = ggml.round_trip(weights, type_, importance.get(tensor), options.threads)
            measured, estimate = model.divergence(names[tensor], changed), found[tensor][type_]["kld"]
            checks.append({"tensor": tensor, "type": type_, "estimate": estimate, "measured": measured})
            wrong += [abs(estimate / measured - 1)] if measured else []
    content = {
        "kind": "sensitivity",
        "source": origin["source"],
        "imatrix_sha256": manifest.read(options.imatrix)["files"][quantizer.IMATRIX]["sha256"],
        "calibration_sha256": windows.sha256,
        "tokens": sum(map(len, windows.samples)),
        "probe": PROBE,
        "device": devices.describe(device, options.threads),
        "tensors": found,
        "checks": checks,
        "median_error": median(wrong) if wrong else None,
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_bytes": manifest.peak_rss_bytes(),
    }
    write_json(options.out, content)
