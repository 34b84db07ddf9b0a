"""Details of rows on the page beyond their figures: where divergence lies, when tokens came, what was written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from tokenizers import Tokenizer

from quantmill.common import limited, tokenizer
from quantmill.common.program import UserError
from quantmill.quality import teacher_forcing
from quantmill.report import repetition, tasks
from quantmill.report.labels import label
from quantmill.report.results import read_part
from quantmill.report.rows import Cell

# KL divergence, in nats: four bins a decade; what is below the first edge or above the last falls into the ends
EDGES = np.logspace(-6, 1, 29)
QUANTILES = (0, 0.01, 0.05, *(step / 20 for step in range(2, 19)), 0.95, 0.98, 0.99, 0.995, 0.999, 1)
WORST = 5  # passages
BEFORE, AFTER = 40, 12  # tokens around the worst ones
APART = 32  # tokens that two of them lie apart at least


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Read the tokenizer of an artifact's folder; None without a tokenizer.json that the tokenizers library reads.

    Some models have only other kinds; their texts are shown as ids.
    """
    try:
        return tokenizer.load(folder) if (folder / tokenizer.FILE).exists() else None
    except UserError:
        return None


def decode(words: Tokenizer | None, ids: Sequence[int]) -> str:
    """Return tokens as text, special ones too; without a tokenizer their ids."""
    return tokenizer.decode(words, ids, tokenizer.FILE, special=True) if words else " ".join(map(str, ids))


def divergence(cell: Cell, words: Tokenizer | None, protocol: str) -> dict[str, Any] | None:
    """Return the KL divergence of every scored position as a histogram, and where it is largest; None without scores.

    `shares`: of positions, one a bin of `EDGES` and its two ends. `worst`: text before, the token, text after.
    """
    path = Path(cell["quality"]).with_suffix(".npz") if cell["quality"] else None
    if not path or not path.exists():
        return None
    again = f"delete it and {cell['quality']}, and measure again"
    text = teacher_forcing.read_text(Path(cell["evaluation"]), protocol)
    places = np.concatenate([np.arange(window.first, window.last) for window in text.windows])
    try:
        with np.load(path) as positions:
            if "kld" not in positions:  # of an engine that returns no logits
                return None
            kld, delta_p = positions["kld"].astype(float), positions["delta_p"].astype(float)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile):
        raise UserError(f"{path}: is damaged; {again}") from None
    if len(kld) != len(places):
        raise UserError(f"{path}: holds {len(kld)} positions where the text has {len(places)}; {again}")
    counts = np.bincount(np.searchsorted(EDGES, kld), minlength=len(EDGES) + 1)
    worst: list[int] = []
    for position in np.argsort(-kld):
        if all(abs(places[position] - places[other]) >= APART for other in worst):
            worst.append(int(position))
        if len(worst) == WORST:
            break
    passages = []
    for position in worst:
        place = int(places[position])
        window = next(each for each in text.windows if each.first <= place < each.last)
        passages.append(
            {
                "before": decode(words, text.ids[max(window.start, place - BEFORE) : place]),
                "token": decode(words, [text.ids[place]]),
                "after": decode(words, text.ids[place + 1 : min(window.stop, place + 1 + AFTER)]),
                "kld": round(float(kld[position]), 4),
                "delta_p": round(float(delta_p[position]), 4),
            }
        )
    return {"shares": [round(float(share), 6) for share in counts / len(kld)], "worst": passages}


def times(speed: Mapping[str, Any]) -> dict[str, Any]:
    """Return quantiles of the times between tokens, in ms, and of each prompt its median TTFT, in ms, and tokens/s."""
    runs = speed["runs"]
    gaps = np.concatenate([np.diff(run["token_seconds"]) for run in runs]) * 1000
    prompts = []
    for number, prompt in enumerate(speed["prompts"]):
        seconds = [run["token_seconds"] for run in runs if run["prompt"] == number]
        prompts.append(
            {
                "tokens": prompt["tokens"],
                "ttft_ms": round(float(np.median([each[0] for each in seconds])) * 1000, 4),
                "tokens_per_second": round(sum(map(len, seconds)) / sum(each[-1] for each in seconds), 4),
            }
        )
    return {"gaps_ms": [round(float(value), 5) for value in np.quantile(gaps, QUANTILES)], "prompts": prompts}


def output(ids: Sequence[int], expected: Sequence[int] | None, words: Tokenizer | None) -> dict[str, Any]:
    """Split what was written after a prompt: `same` as the reference, the first `other` token, and the `rest`.

    `at`: number of that token, from 1; None if all are the same. `loop`: the token from which on it repeats itself.
    """
    loop = (repetition.find(ids) or [None])[0]
    at = next((i for i, (a, b) in enumerate(zip(ids, expected or ids, strict=True)) if a != b), None)
    if at is None:
        return {"same": decode(words, ids), "at": None, "loop": loop}
    same, through = decode(words, ids[:at]), decode(words, ids[: at + 1])
    if not through.startswith(same):  # half a character, say
        same, through = "", decode(words, ids)
    whole = decode(words, ids)
    rest = whole[len(through) :] if whole.startswith(through) else decode(words, ids[at + 1 :])
    return {"same": same, "other": through[len(same) :], "rest": rest, "at": at + 1, "loop": loop}


def of_model(cells: Sequence[Cell], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details of one model's measured formats, its prompts, and whether its weights are random."""
    return limited.call(lambda: _of_model(cells, config))  # tokenizers are a stranger's


def _of_model(cells: Sequence[Cell], config: Mapping[str, Any]) -> dict[str, Any]:
    reference = config["reference"]
    speeds = {label(cell): speed for cell in cells if (speed := read_part(cell, config, "latency")[0])}
    words = next(filter(None, (read_tokenizer(Path(cell["artifact"])) for cell in cells)), None)
    expected = [prompt["output_ids"] for prompt in speeds[reference]["prompts"]] if reference in speeds else None
    formats, asked = {}, tasks.details(cells, config)
    for cell in cells:
        speed = speeds.get(label(cell))
        scored = read_part(cell, config, "quality")[0]
        entry: dict[str, Any] = {"divergence": scored and divergence(cell, words, config["perplexity"])}
        if speed:
            entry |= times(speed)
            entry["outputs"] = [
                output(prompt["output_ids"], expected and expected[number], words)
                if prompt["output_ids"]
                else {"same": prompt["output_text"], "at": None, "loop": None, "untold": True}
                for number, prompt in enumerate(speed["prompts"])
            ]
        entry["tasks"] = asked.get(label(cell))
        formats[label(cell)] = entry
    texts = next(([prompt["text"] for prompt in speed["prompts"]] for speed in speeds.values()), [])
    random = all(cell["quality"] is None for cell in cells)
    return {"prompts": texts, "formats": formats, "random": random, "compared": expected is not None}
