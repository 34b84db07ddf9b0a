#!/usr/bin/env python3
"""Measure what an artifact lost: perplexity of the evaluation text, and divergence from the reference's predictions.

    python scripts/quality.py ARTIFACT OUT --engine ctranslate2 --evaluation evaluation.json --reference logits.npy
        --gate gate.json

OUT is a JSON file with sums a window (so that intervals and paired differences can be computed from it) and the
summary; beside it, OUT with the suffix .npz holds NLL, KL divergence and agreement of every position.
"""

from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import devices
import engines
from common import alignment, manifest, scoring
from common.program import UserError, parser, run
from common.publish import publish, publish_json
from devices import cpu, cuda
from metrics import METRICS_VERSION, bootstrap, divergence, perplexity

ROWS = 64  # positions whose float64 log-probabilities exist at a time


def score(engine: engines.Engine, text: scoring.Text, reference: np.ndarray) -> dict[str, np.ndarray]:
    """Window number, NLL, KL divergence (nats) and top-1 agreement of every scored position; each [positions]."""
    if len(reference) != text.positions:
        raise UserError(f"the reference's logits are of {len(reference)} positions, not {text.positions}; rebuild them")
    parts: list[dict[str, np.ndarray]] = []
    with tqdm(total=text.positions, desc="positions", mininterval=1) as bar:
        for chunk in scoring.chunks(engine, text):
            parts += score_chunk(chunk, reference)
            bar.update(len(chunk.targets))
            del chunk  # or it would still be held while the engine makes the next one
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def score_chunk(chunk: scoring.Chunk, reference: np.ndarray) -> list[dict[str, np.ndarray]]:
    """The columns of `score` for one chunk, in pieces of `ROWS` positions."""
    parts = []
    for low in range(0, len(chunk.targets), ROWS):
        logits, targets = chunk.logits[low : low + ROWS], chunk.targets[low : low + ROWS]
        kept = reference[chunk.first + low : chunk.first + low + len(targets)]
        if logits.shape[1] < kept.shape[1]:
            raise UserError(f"the engine's vocabulary is {logits.shape[1]}, the reference's {kept.shape[1]}")
        # some formats pad the vocabulary; what the reference cannot say takes no part
        candidate = perplexity.log_softmax(logits[:, : kept.shape[1]])
        expected = perplexity.log_softmax(kept)
        parts.append(
            {
                "window": np.full(len(targets), chunk.window),
                "nll": -candidate[np.arange(len(targets)), targets],
                "kld": divergence.kl_divergence(expected, candidate),
                "top1": divergence.top1_agreement(expected, candidate),
            }
        )
    return parts


def summarise(positions: dict[str, np.ndarray], windows: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Sums a window, and the summary with bootstrap intervals over windows."""
    sums = {name: np.bincount(positions["window"], positions[name], windows) for name in ("nll", "kld", "top1")}
    tokens = np.bincount(positions["window"], minlength=windows)
    resamples = bootstrap.indices(windows)
    replicates = {name: perplexity.ratio_of_sums(values, tokens, resamples) for name, values in sums.items()}
    perplexity_low, perplexity_high = np.exp(bootstrap.interval(replicates["nll"], windows))
    kld_low, kld_high = bootstrap.interval(replicates["kld"], windows)
    summary = {
        "perplexity": perplexity.perplexity(sums["nll"], tokens),
        "perplexity_low": float(perplexity_low),
        "perplexity_high": float(perplexity_high),
        **divergence.summary(positions["kld"]),
        "kld_mean_low": kld_low,
        "kld_mean_high": kld_high,
        "top1_agreement": float(positions["top1"].mean()),
    }
    return {"tokens": tokens.tolist()} | {name: values.tolist() for name, values in sums.items()}, summary


def main() -> None:
    arguments = parser(__doc__)
    scoring.add_arguments(arguments)
    arguments.add_argument("--reference", type=Path, required=True, help="what reference_logits.py wrote")
    arguments.add_argument("--gate", type=Path, required=True, help="what gate.py wrote for the reference")
    options = arguments.parse_args()

    device = devices.resolve(options.device)
    threads = min(options.threads, cpu.available_threads())
    artifact = manifest.read(options.artifact)
    text = scoring.read_text(options.evaluation, options.protocol)
    reference = np.load(options.reference, mmap_mode="r")
    engine = engines.load(options.engine, options.artifact, device, threads)
    alignment.examine(engine, options.artifact, text.ids, options.gate)
    positions = score(engine, text, reference)
    windows, summary = summarise(positions, len(text.windows))
    result = {
        "kind": "quality",
        "metrics_version": METRICS_VERSION,
        "artifact": artifact,
        "engine": options.engine,
        "protocol": {"perplexity": options.protocol, "windows": len(text.windows), **text.facts},
        "summary": summary,
        "total_nll": float(positions["nll"].sum()),
        "scored_tokens": text.positions,
        "compute_type": engine.compute_type,
        "versions": engine.versions(),
        "device": devices.describe(device, threads),
        "peak_memory_bytes": cuda.used_bytes() if device == "cuda" else manifest.peak_rss_bytes(),
        "windows": windows,
    }
    with publish(options.out.with_suffix(".npz")) as partial, partial.open("wb") as file:
        small = {name: positions[name].astype(np.float32) for name in ("nll", "kld")}
        np.savez(file, top1=positions["top1"], **small)
    publish_json(options.out, result)


if __name__ == "__main__":
    run(main)
