"""Teacher-forced scoring: an engine's logits over a tokenised text, window by window, one chunk at a time."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.program import UserError
from devices import cpu
from engines import Engine
from metrics import bootstrap, perplexity

WINDOWS = {"gptq-2048": perplexity.gptq_windows}  # how each protocol cuts a text
PROTOCOLS = tuple(WINDOWS)


@dataclass(frozen=True)
class Text:
    """A tokenised evaluation text and the windows that a protocol cuts it into."""

    ids: list[int]
    windows: list[tuple[int, int]]
    facts: dict[str, Any]

    @property
    def positions(self) -> int:
        """Scored positions: every token of every window but its first."""
        return sum(stop - start - 1 for start, stop in self.windows)

    def first(self, count: int) -> "Text":
        """The same text, of which only the first windows are scored."""
        return replace(self, windows=self.windows[:count])


@dataclass(frozen=True)
class Chunk:
    """Logits [n, vocab] of a window's positions, the ids [n] that follow them, and the first's index in the text's
    scored positions."""

    window: int
    first: int
    logits: np.ndarray
    targets: np.ndarray


def add_arguments(arguments: argparse.ArgumentParser) -> None:
    """What every scoring program is told."""
    arguments.add_argument("artifact", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--engine", required=True, help="a module of scripts/engines")
    arguments.add_argument("--evaluation", type=Path, required=True, help="what tokenize_texts.py wrote")
    arguments.add_argument("--protocol", choices=PROTOCOLS, default=PROTOCOLS[0])
    arguments.add_argument("--device", default="auto", help="auto, cpu or cuda")
    arguments.add_argument("--threads", type=int, default=cpu.available_threads(), help="CPU threads at most")


def read_text(path: Path, protocol: str) -> Text:
    """Read what tokenize_texts.py wrote and cut it by a protocol. Raises `UserError` where it fills too few windows."""
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        windows = WINDOWS[protocol](len(content["ids"]), content["context"])
    except ValueError as error:
        raise UserError(f"{path}: {error}; give the model a longer evaluation text") from None
    size = windows[0][1] - windows[0][0]
    if len(windows) < bootstrap.MINIMUM:
        raise UserError(
            f"{path}: the evaluation text fills {len(windows)} windows of {size} tokens, and an interval wants "
            f"{bootstrap.MINIMUM}; give the model a longer one"
        )
    facts = {key: content[key] for key in ("text_sha256", "bytes", "words")}
    facts |= {"tokens": len(content["ids"]), "window": size, "dropped_tokens": len(content["ids"]) % size}
    return Text(content["ids"], windows, facts)


def chunks(engine: Engine, text: Text) -> Iterator[Chunk]:
    """Yield every scored position's logits, in order. Raises `UserError` where they are not finite or too few."""
    first = 0
    for number, (start, stop) in enumerate(text.windows):
        ids = text.ids[start:stop]
        seen = 0
        for logits in engine.logits(ids):
            logits = logits[: len(ids) - 1 - seen]  # the last position predicts a token that no window holds
            if not np.isfinite(logits).all():
                raise UserError(
                    f"window {number}: the engine returned logits that are not finite; the artifact is broken"
                )
            targets = np.array(ids[seen + 1 : seen + 1 + len(logits)])
            if len(logits):
                yield Chunk(number, first + seen, logits, targets)
            seen += len(logits)
            del logits  # the engine makes the next chunk while this one is gone
        if seen != len(ids) - 1:
            raise UserError(f"window {number}: the engine returned logits of {seen} positions, not {len(ids) - 1}")
        first += seen
