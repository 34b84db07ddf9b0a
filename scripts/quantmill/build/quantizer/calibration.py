"""Calibration samples: windows of a tokenised text that shares nothing with the text on which quality is measured."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantmill.common.program import UserError
from quantmill.tokens.files import Tokens

SHARED = 32  # tokens in a row; two texts do not share them by chance
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, of a rolling hash modulo 2**64


@dataclass(frozen=True)
class Calibration:
    """`samples`: windows of `sequence_length` token ids each. `sha256`: of the text, None without samples."""

    samples: list[list[int]]
    sequence_length: int
    sha256: str | None


NONE = Calibration([], 0, None)


def add_arguments(arguments: argparse.ArgumentParser, required: bool = True, sizes: bool = True) -> None:
    """Add the texts' files and, with `sizes`, how much of the calibration text is taken."""
    arguments.add_argument("--calibration", type=Path, required=required, help="what tokens.tokenize_texts wrote")
    arguments.add_argument("--evaluation", type=Path, required=required, help="the same of the evaluation text")
    if sizes:
        arguments.add_argument("--samples", type=int, required=required)
        arguments.add_argument("--sequence-length", type=int, required=required, help="tokens of each sample")


def of_options(options: argparse.Namespace) -> Calibration:
    """Read the samples that a program's options name."""
    words = {name: getattr(options, name) for name in ("samples", "sequence_length", "seed")}
    return read(options.calibration, options.evaluation, **words)


def read(path: Path, evaluation: Path, *, samples: int, sequence_length: int, seed: int) -> Calibration:
    """Draw windows from what tokens.tokenize_texts wrote, without replacement and in the text's order.

    A text that fills fewer windows gives all of them. Raises `UserError` where it fills none, or where it shares a
    passage with the evaluation text: what was calibrated on it would be measured on it.
    """
    text = Tokens.read(path)
    ids, evaluated = text.ids, Tokens.read(evaluation).ids
    length = min(sequence_length, text.context or sequence_length)
    count = len(ids) // length
    if count == 0:
        raise UserError(f"{path}: the calibration text has {len(ids)} tokens, fewer than one sample of {length}")
    check_apart(path, ids, evaluated)
    chosen = np.sort(np.random.default_rng(seed).choice(count, min(samples, count), replace=False))
    windows = [ids[number * length : (number + 1) * length] for number in chosen.tolist()]
    return Calibration(windows, length, text.text_sha256)


def check_apart(path: Path, ids: list[int], evaluated: list[int]) -> None:
    """Raise `UserError` where the calibration text of `path` shares a passage with the evaluation text."""
    place = shared_passage(ids, evaluated)
    if place is not None:
        raise UserError(
            f"{path}: the calibration text shares {SHARED} tokens in a row with the evaluation text, from token "
            f"{place} on; name another text in texts.calibration or texts.evaluation"
        )


def shared_passage(ids: list[int], others: list[int]) -> int | None:
    """Return the first place of `SHARED` tokens in a row that `others` has too, or None."""
    mine, theirs = _window_hashes(ids), _window_hashes(others)
    places = np.flatnonzero(np.isin(mine, theirs))
    return int(places[0]) if len(places) else None


def _window_hashes(ids: list[int]) -> np.ndarray:
    """Return a 64-bit polynomial hash of each window of `SHARED` ids; uint64 [max(0, len(ids) - SHARED + 1)]."""
    values = np.asarray(ids, np.uint64) + np.uint64(1)
    if len(values) < SHARED:
        return np.zeros(0, np.uint64)
    return np.convolve(values, BASE ** np.arange(SHARED, dtype=np.uint64), "valid")
