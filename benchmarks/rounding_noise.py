#!/usr/bin/env python3
"""Measure the change of an artifact's predictions when layers' inputs change by float16's rounding, as JSON.

    envs/quantizers/bin/python benchmarks/rounding_noise.py OUT artifacts/MODEL/FORMAT…

Two orders of the same sums, as in prefill and decoding, differ by roundings of this size in each layer. transformers
reads eight pieces of 256 tokens of the evaluation text in float32: unchanged, and with each input of a linear layer
changed at random by up to 2**-11 of itself. Two figures follow: the nats by which the likeliest tokens with the change
are behind without it, and the shift of the mean log-probability of a piece's tokens. Loads of a server are judged by
both (scripts/quantmill/loads/agreement.py, scripts/quantmill/loads/server_start.py).
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from quantmill import engines
from quantmill.checkpoint import shards
from quantmill.common import manifest
from quantmill.common.atomic import write_json
from quantmill.common.program import UserError, parser, run

THREADS, PIECES, TOKENS = 2, 8, 256
ROUNDING = 2.0**-11  # of a value: half of float16's last place


def read_twice(artifact: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log-probabilities [PIECES, TOKENS, vocab] without and with the change, and ids [PIECES, TOKENS].

    Raises `UserError` for a text that is too short and for another engine than transformers.
    """
    path = artifact.parent / "tokens/evaluation.json"
    text = shards.read_json(path)["ids"]
    if len(text) < PIECES * TOKENS:
        raise UserError(f"{path}: has {len(text)} tokens, but {PIECES * TOKENS} are needed; name a longer text")
    import torch

    engine: Any = engines.load(manifest.read(artifact)["engine"], artifact, "cpu", THREADS, dtype="float32")
    random = torch.Generator().manual_seed(0)

    def change(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (values,) = inputs
        return (values * (1 + ROUNDING * (2 * torch.rand(values.shape, generator=random) - 1)),)

    pieces = [text[number * TOKENS : (number + 1) * TOKENS] for number in range(PIECES)]

    def read(ids: list[int]) -> np.ndarray:
        logits = np.concatenate([np.array(chunk) for chunk in engine.logits(ids)]).astype(np.float64)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    if not hasattr(engine, "model"):
        raise UserError(f"{artifact}: its layers are not transformers' own; name an artifact that transformers loads")
    plain = np.array([read(ids) for ids in pieces])
    for module in engine.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(change)
    return plain, np.array([read(ids) for ids in pieces]), np.array(pieces)


def compare(plain: np.ndarray, moved: np.ndarray, ids: np.ndarray) -> dict[str, Any]:
    """Compare log-probabilities [pieces, tokens, vocab] without and with the change.

    Returns the nats by which the changed likeliest token is behind without the change, the share of positions with
    another likeliest token, the shift of the likeliest token's log-probability, and the shift per token of the mean
    log-probability of a piece's tokens (`ids` [pieces, tokens]), as a mean over pieces.
    """
    first = plain.argmax(axis=2)[..., None]
    behind = np.take_along_axis(plain, first, 2) - np.take_along_axis(plain, moved.argmax(axis=2)[..., None], 2)
    shift = np.take_along_axis(moved - plain, first, 2)
    own = np.take_along_axis((moved - plain)[:, :-1], ids[:, 1:, None], 2)
    return {
        "largest": behind[..., 0].max(axis=1).tolist(),
        "largest_of_all": float(behind.max()),
        "mean": float(behind.mean()),
        "percentile_99": float(np.percentile(behind, 99)),
        "other_first_choice": float((behind > 0).mean()),
        "moved_root_mean_square": float(np.sqrt((shift**2).mean())),
        "text_moved": float(np.abs(own.mean(axis=(1, 2))).mean()),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("artifacts", type=Path, nargs="+")
    options = arguments.parse_args()
    found = {}
    for artifact in options.artifacts:
        found[artifact.name.replace("-", "_")] = compare(*read_twice(artifact))
        write_json(options.out, found)


if __name__ == "__main__":
    run(main)
