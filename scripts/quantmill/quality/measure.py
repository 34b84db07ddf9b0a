"""Measure an artifact's loss: perplexity of the evaluation text, and divergence from the reference's predictions.

    python scripts/quantmill quality.measure ARTIFACT OUT --engine ctranslate2 --evaluation evaluation.json
        --expected expected.json (--reference FOLDER | --write-reference FOLDER)

OUT is a JSON file with each window's sums (from which intervals and paired differences can be computed) and the
summary. OUT with the suffix .npz has the values of every position.

--write-reference makes the artifact the reference: the same forward passes that give its own row write the folder with
which all others are compared (`quality.reference`). --noise-floor scores the reference itself in another dtype, on the
first windows: the distance of two runs of the same weights.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tqdm import tqdm

from quantmill import devices, engines
from quantmill.common import manifest
from quantmill.common.atomic import write_atomically, write_json
from quantmill.common.program import UserError, parser
from quantmill.devices import cuda, processes
from quantmill.metrics import METRICS_VERSION, bootstrap, divergence, perplexity
from quantmill.metrics.windows import PROTOCOLS
from quantmill.quality import alignment, reference, teacher_forcing
from quantmill.quality.reference import Reference

BLOCK = 2**18  # logits compared at a time on a CPU: three copies of 1 MiB each fit its cache
NOISE_WINDOWS = 8  # 4,000 positions or more; on a CPU float16 takes many times as long as float32


def score(
    engine: engines.Engine, text: teacher_forcing.Text, kept: Reference, card: bool = False, whole: int | None = None
) -> dict[str, np.ndarray]:
    """Return the window number and the values of `divergence.measure` for every scored position; each [positions].

    card: compare on the GPU what an engine returns as arrays.
    whole: positions of the reference's predictions, if the text is only their beginning.
    """
    expected = whole or text.positions
    if kept.positions != expected:
        raise UserError(f"the reference's predictions are of {kept.positions} positions, not {expected}; rebuild them")
    return collect(teacher_forcing.chunks(engine, text, card=card), text, kept)


def score_reference(
    engine: engines.Engine, text: teacher_forcing.Text, folder: Path, device: str, keep: str = "auto"
) -> dict[str, np.ndarray]:
    """Write the predictions of an engine as the reference's, and return the columns of `score` for itself.

    keep: `logits`, or `auto` for states where `reference.keeps_states` says so and the engine has a head.

    Raises `UserError` if the engine returns no logits.
    """
    if "logits" not in engine.capabilities:
        raise UserError(f"engine {engine.name} returns no logits, so that nothing can be compared with it")
    head = engine.head(text.read(text.windows[0].start, text.windows[0].stop))
    if head and (keep == "logits" or not reference.keeps_states(text.positions, len(head.weight), device)):
        head = None
    with write_atomically(folder) as partial, reference.Writer(partial, text.positions, head) as writer:

        def written() -> Iterator[teacher_forcing.Chunk]:
            for chunk in teacher_forcing.chunks(engine, text, head, device == "cuda"):
                writer.add(chunk)
                yield chunk
                del chunk  # or it would still be held while the engine makes the next one

        return collect(written(), text, None)


def collect(
    chunks: Iterable[teacher_forcing.Chunk], text: teacher_forcing.Text, kept: Reference | None
) -> dict[str, np.ndarray]:
    """Return the columns of `score` of chunks; without `kept` they are the reference's own."""
    parts: list[dict[str, Any]] = []
    work: Any = None
    with tqdm(total=text.positions, desc="positions", mininterval=1) as bar:
        for chunk in chunks:
            xp = teacher_forcing.library(chunk.logits)
            vocab = kept.vocab_size if kept else chunk.logits.shape[1]
            size = max(1, BLOCK // vocab) if xp is np else len(chunk.targets)
            if work is None and xp is np:
                work = np.empty((3, size, vocab), np.float32)
            for low in range(0, len(chunk.targets), size):
                parts.append(measure(chunk, slice(low, low + size), kept, xp, work))
            bar.update(len(chunk.targets))
            del chunk  # free it before the engine makes the next one
    # only now from a GPU, which works on while the next chunk is made ready
    return {name: teacher_forcing.to_host(xp.concatenate([part[name] for part in parts])) for name in parts[0]}


def score_targets(engine: engines.Engine, text: teacher_forcing.Text, kept: Reference) -> dict[str, np.ndarray]:
    """Return the columns of `score` for an engine without logits: a lower bound of the divergence, `kld_lower_bound`,
    and `top1`, both only if the engine returns its likeliest tokens."""
    parts: list[dict[str, np.ndarray]] = []
    size = max(1, BLOCK // kept.vocab_size)
    for number, found, ids in teacher_forcing.targets(engine, text):
        for low in range(0, len(ids), size):
            told = engines.Targets(*(each[low : low + size] for each in found))
            rows = kept.rows(len(told.logprobs), np.empty(0))
            values = divergence.bound(*told, rows, ids[low : low + size])
            parts.append({"window": np.full(len(rows), number)} | values)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def measure(
    chunk: teacher_forcing.Chunk, rows: slice, kept: Reference | None, xp: ModuleType, work: Any
) -> dict[str, Any]:
    """Return the columns of `score` for some rows of a chunk, on its device."""
    targets, candidate = chunk.targets[rows], chunk.logits[rows]
    if kept:
        if chunk.logits.shape[1] < kept.vocab_size:
            raise UserError(f"the engine's vocabulary is {chunk.logits.shape[1]}, the reference's {kept.vocab_size}")
        candidate = candidate[:, : kept.vocab_size]  # some formats pad theirs: the reference lacks those tokens
    expected = kept.rows(len(targets), candidate) if kept else candidate  # the reference's own row
    if xp is not np:  # from pinned memory the host does not wait for the copy
        targets = xp.from_numpy(targets).pin_memory().to(candidate.device, non_blocking=True)
    window = xp.full((len(targets),), chunk.window, device=candidate.device)
    return {"window": window} | divergence.measure(candidate, expected, targets, xp, work)


def summarise(positions: dict[str, np.ndarray], text: teacher_forcing.Text, protocol: str) -> dict[str, Any]:
    """Summarize the positions for a result file: each window's sums, and figures with bootstrap intervals over windows.

    Without `kld` in `positions`, figures that follow from it are None. Raises `UserError` for a perplexity that is not
    a number.
    """
    windows, facts = len(text.windows), text.facts
    names = [name for name in ("nll", "kld", "top1") if name in positions]
    sums = {name: np.bincount(positions["window"], positions[name], windows) for name in names}
    tokens, counts = np.bincount(positions["window"], minlength=windows), np.array(text.counts)
    resamples = bootstrap.indices(windows)
    perplexity_low, perplexity_high = np.exp(
        bootstrap.interval(perplexity.ratio_of_sums(sums["nll"], counts, resamples), windows)
    )
    loss: Mapping[str, float | None] = divergence.without_kld(positions)
    kld_low, kld_high = None, None
    if "kld" in positions:
        loss = divergence.summary(positions["kld"], positions["delta_p"], positions["top1"])
        kld_low, kld_high = bootstrap.interval(perplexity.ratio_of_sums(sums["kld"], tokens, resamples), windows)
    try:
        headline = perplexity.perplexity(sums["nll"], counts)
    except OverflowError as error:
        raise UserError(str(error)) from None
    summary = {
        "perplexity": headline,
        "perplexity_low": float(perplexity_low),
        "perplexity_high": float(perplexity_high),
        **loss,
        "kld_mean_low": kld_low,
        "kld_mean_high": kld_high,
    }
    if PROTOCOLS[protocol].bos:
        summary["perplexity_standard_error"] = perplexity.standard_error(positions["nll"])
    nll = float(positions["nll"].sum())
    return {
        "protocol": {"perplexity": protocol, "windows": windows, **facts},
        "summary": summary,
        "headline": f"{facts['unit'].removesuffix('s')}_perplexity",
        "normalised": perplexity.normalise(
            nll / text.positions, *(facts[name] for name in ("tokens", "words", "bytes"))
        ),
        "total_nll": nll,
        "scored_tokens": text.positions,
        **{name: facts[name] for name in ("tokens", "words", "bytes")},
        "windows": {
            "tokens": tokens.tolist(),
            "counts": text.counts,
            **{name: values.tolist() for name, values in sums.items()},
        },
    }


def write_positions(out: Path, positions: dict[str, np.ndarray]) -> None:
    """Write the values of every position to a file beside the result."""
    kinds = {"top1": np.bool_, **dict.fromkeys(("nll", "kld", "kld_lower_bound", "delta_p"), np.float32)}
    with write_atomically(out.with_suffix(".npz")) as partial, partial.open("wb") as file:
        arrays: dict[str, Any] = {name: positions[name].astype(kinds[name]) for name in kinds if name in positions}
        np.savez(file, **arrays)


def main() -> None:
    arguments = parser(__doc__)
    teacher_forcing.add_arguments(arguments)
    group = arguments.add_mutually_exclusive_group(required=True)
    group.add_argument("--reference", type=Path, help="what --write-reference wrote")
    group.add_argument("--write-reference", type=Path, help="a folder to write: the artifact is the reference")
    arguments.add_argument("--keep", choices=("auto", "logits"), default="auto", help="what is written there")
    arguments.add_argument(
        "--expected", type=Path, help="what gate.expected wrote for the source; the engine is checked with it"
    )
    arguments.add_argument("--noise-floor", action="store_true", help="score the reference in another dtype")
    options = arguments.parse_args()

    device = devices.resolve(options.device, gpus=options.gpus)
    artifact = manifest.read_unchanged(options.artifact)
    text = teacher_forcing.read_text(options.evaluation, options.protocol)
    result = {
        "kind": "noise floor" if options.noise_floor else "quality",
        "metrics_version": METRICS_VERSION,
        "artifact": artifact,
        "engine": options.engine,
        "options": options.options,
        "gpus": options.gpus,
    }
    changes, whole = {}, text.positions
    if options.noise_floor:
        dtype = engines.other_dtype(options.engine, device)
        if dtype is None:
            reason = f"the engine {options.engine} calculates in one dtype only"
            write_json(options.out, result | {"summary": None, "reason": reason})
            return
        changes, text = {"dtype": dtype}, text.first(NOISE_WINDOWS)
    loading = options.engine, options.artifact, device, options.threads, options.gpus, options.stream
    engine = engines.load(*loading, **options.options | changes)
    if not engine.capabilities & {"logits", "target_logprobs"}:
        write_positions(options.out, {})
        protocol = {"perplexity": options.protocol}
        reason = teacher_forcing.NO_PROBABILITIES
        write_json(options.out, result | {"protocol": protocol, "summary": None, "reason": reason})
        return
    pieces = alignment.texts(options.artifact, text.ids, options.expected) if options.expected else []
    engine.read_ahead([*text.inputs(), *pieces])
    if options.expected:
        alignment.examine(engine, options.artifact, text.ids, options.expected)
    whole_answer = "logits" in engine.capabilities
    if options.write_reference:
        positions = score_reference(engine, text, options.write_reference, device, options.keep)
    elif whole_answer:
        positions = score(engine, text, Reference(options.reference), device == "cuda", whole)
    else:
        positions = score_targets(engine, text, Reference(options.reference))
    result |= {
        **summarise(positions, text, options.protocol),
        **({} if whole_answer else {"no_divergence": teacher_forcing.NO_LOGITS}),
        "compute_type": engine.compute_type,
        "versions": engine.versions(),
        "device": devices.describe(device, engine.threads or options.threads),
        "peak_memory_bytes": cuda.used_bytes() if device == "cuda" else processes.peak_rss_bytes(engine.processes()),
    }
    if not options.noise_floor:
        write_positions(options.out, positions)
    write_json(options.out, result)
