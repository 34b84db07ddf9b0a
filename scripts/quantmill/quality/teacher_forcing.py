"""Teacher-forced scoring: an engine's logits over a tokenised text, window by window, one chunk at a time."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from quantmill import engines
from quantmill.common.program import UserError
from quantmill.devices import cuda
from quantmill.engines import Engine
from quantmill.engines.head import Head
from quantmill.metrics import bootstrap
from quantmill.metrics.windows import PROTOCOLS, Window
from quantmill.tokens.files import Tokens

ASK = 64  # chunks

# reasons of empty cells
NO_LOGITS = "its engine returns no logits"
NO_PROBABILITIES = "its engine returns no probabilities of a given text"


@dataclass(frozen=True)
class Text:
    """A tokenized evaluation text, cut into windows by a protocol.

    counts: by which each window's NLL is divided, scored tokens or words. bos: if not None, it is read instead of each
    window's first token.
    """

    ids: list[int]
    windows: list[Window]
    counts: list[float]
    facts: dict[str, Any]
    bos: int | None = None

    @property
    def positions(self) -> int:
        """Number of scored positions."""
        return sum(window.last - window.first for window in self.windows)

    def read(self, start: int, stop: int) -> list[int]:
        """Return the ids that a model reads at a window's places from start to stop."""
        ids = self.ids[start:stop]
        return ids if self.bos is None else [self.bos, *ids[1:]]

    def inputs(self) -> list[list[int]]:
        """Return what a model reads of each window, to score it."""
        return [self.read(window.start, window.stop) for window in self.windows]

    def first(self, count: int) -> "Text":
        """Return the same text, of which only the first `count` windows are scored."""
        return replace(self, windows=self.windows[:count], counts=self.counts[:count])


@dataclass(frozen=True)
class Chunk:
    """Logits [n, vocab] of a window's positions, as the engine's own array, and the ids [n] that follow them.

    states: [n, hidden], of which a head made the logits, where they are kept.
    """

    window: int
    logits: Any
    targets: np.ndarray
    states: Any = None


def add_arguments(arguments: argparse.ArgumentParser) -> None:
    """Add the arguments of a program that scores an artifact."""
    add_text_arguments(arguments, "artifact")
    engines.add_arguments(arguments)


def add_text_arguments(arguments: argparse.ArgumentParser, folder: str) -> None:
    """Add the arguments of all scoring programs: a model's `folder`, and the text."""
    arguments.add_argument(folder, type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--evaluation", type=Path, required=True, help="what tokens.tokenize_texts wrote")
    arguments.add_argument("--protocol", choices=list(PROTOCOLS), default="gptq-2048")
    arguments.add_argument("--stream", action="store_true", help="run a model of transformers block by block")


def read_text(path: Path, protocol: str) -> Text:
    """Read what tokens.tokenize_texts wrote, cut by a protocol. Raises `UserError` if it fills too few windows."""
    tokens = Tokens.read(path)
    way, context = PROTOCOLS[protocol], tokens.context
    facts: dict[str, Any] = {"text_sha256": tokens.text_sha256, "unit": way.unit}
    if way.documents:
        text = _documents(path, tokens, protocol)
    else:
        try:
            windows = way.windows(len(tokens.ids), context)
        except ValueError as error:
            raise UserError(f"{path}: {error}; give the model a longer evaluation text") from None
        facts |= {"bytes": tokens.bytes, "words": tokens.words, "tokens": len(tokens.ids)}
        counts = [float(window.last - window.first) for window in windows]
        text = Text(tokens.ids, windows, counts, facts, tokens.bos_id if way.bos else None)
    size = max((window.stop - window.start for window in text.windows), default=0)
    if len(text.windows) < bootstrap.MINIMUM:
        raise UserError(
            f"{path}: the evaluation text fills {len(text.windows)} windows of {size} tokens, and an interval needs "
            f"{bootstrap.MINIMUM}; give the model a longer one"
        )
    dropped = len(text.ids) - text.windows[-1].stop
    return replace(text, facts=facts | text.facts | {"window": size, "dropped_tokens": 0 if way.documents else dropped})


def _documents(path: Path, tokens: Tokens, protocol: str) -> Text:
    """Join documents, each after the prefix token; no window has tokens of two.

    A document's words are distributed over its windows in proportion to its tokens.
    """
    documents = [document for document in tokens.documents if document.ids]
    prefix = tokens.prefix_id
    if prefix is None:
        raise UserError(f"{path}: {protocol} needs a token before each document, and this tokenizer has no such token")
    ids: list[int] = []
    windows: list[Window] = []
    counts: list[float] = []
    for document in documents:
        length = len(document.ids)
        for window in PROTOCOLS[protocol].windows(length + 1, tokens.context):
            windows.append(Window(*(place + len(ids) for place in window)))
            counts.append(document.words * (window.last - window.first) / length)
        ids += [prefix, *document.ids]
    facts = {name: sum(getattr(document, name) for document in documents) for name in ("bytes", "words")}
    facts |= {"tokens": len(ids) - len(documents), "documents": len(documents), "detokenizer": tokens.detokenizer}
    return Text(ids, windows, counts, facts)


def chunks(engine: Engine, text: Text, head: Head | None = None, card: bool = False) -> Iterator[Chunk]:
    """Yield the logits of all scored positions in order; with the engine's `head`, also the states that it reads. With
    `card`, arrays are copied to the GPU, if torch can do that.

    Raises `UserError` if they are not finite or too few. A GPU is asked only once in `ASK` chunks whether they are
    finite, because that is waiting for it.
    """
    torch = cuda.torch() if card else None
    unknown: list[tuple[int, Any]] = []  # windows, with whether their logits are finite
    for number, window in enumerate(text.windows):
        ids = text.read(window.start, window.stop)
        first, last = window.first - 1 - window.start, window.last - 1 - window.start  # positions that are scored
        seen = 0
        for made in engine.states(ids) if head else engine.logits(ids):
            low, seen = seen, seen + len(made)
            made = made[max(first - low, 0) : max(last - low, 0)]
            low = max(low, first)
            if len(made):
                logits, states = (head.logits(made), made) if head else (made, None)
                if torch and isinstance(logits, np.ndarray):
                    logits = torch.from_numpy(logits).cuda()
                unknown.append((number, all_finite(logits)))
                if isinstance(logits, np.ndarray) or len(unknown) == ASK:
                    check_finite(unknown)
                    unknown = []
                targets = text.ids[window.start + low + 1 : window.start + low + 1 + len(made)]
                yield Chunk(number, logits, np.array(targets), states)
                del logits, states
            del made  # free it before the engine makes the next chunk
        if seen < last:
            raise UserError(f"window {number}: the engine returned logits of {seen} positions, not {last}")
    check_finite(unknown)


def check_finite(windows: list[tuple[int, Any]]) -> None:
    """Raise `UserError` for the first window whose logits are not finite, by what `all_finite` returned."""
    for number, finite in windows:
        if not finite:
            raise UserError(f"window {number}: the engine returned logits that are not finite; the artifact is broken")


def targets(engine: Engine, text: Text) -> Iterator[tuple[int, engines.Targets, np.ndarray]]:
    """Yield each window's number, what an engine without logits returns for its scored positions, and their ids.

    Raises `UserError` if that is not finite or too little.
    """
    for number, window in enumerate(text.windows):
        ids = text.read(window.start, window.last)  # with the last target, which some protocols do not read
        found = engine.target_logprobs(ids)
        if len(found.logprobs) != len(ids) - 1:
            told = f"{len(found.logprobs)} log-probabilities, not {len(ids) - 1}"
            raise UserError(f"window {number}: the engine returned {told}")
        first = window.first - 1 - window.start
        scored = engines.Targets(*(np.asarray(each)[first:] for each in found))
        if not (np.isfinite(scored.logprobs).all() and np.isfinite(scored.top_logprobs).all()):
            raise UserError(f"window {number}: the engine returned log-probabilities that are not finite")
        yield number, scored, np.array(ids[first + 1 :])


def library(array: Any) -> ModuleType:
    """Return the library of an engine's arrays: numpy, or torch for tensors."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def to_host(array: Any) -> np.ndarray:
    """Return an engine's array, or part of one, in the host's memory."""
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def all_finite(logits: Any) -> Any:
    """Return whether all logits are finite, as a value on their device: a row's sum shows it, without memory for a
    mask."""
    return library(logits).isfinite(logits.sum(axis=-1)).all()
