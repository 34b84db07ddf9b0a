"""Answer requests of token ids by an engine: log-probabilities of continuations, and texts after a prompt.

    python scripts/quantmill tasks.worker ARTIFACT --engine transformers --vocab 32000

tasks.measure starts it in the engine's environment, which lacks lm-evaluation-harness, and exchanges JSON lines with
it. The first output line is the engine's facts. The input lines and their answers are:

    {"score": [[IDS, [CONTINUATION, ...]], ...]}   a line for each entry: [[sum of log-probabilities, greedy], ...]
        CONTINUATION: ids that the last positions of IDS predict; the last id follows all of IDS.
        greedy: whether each of its ids was the likeliest.
    {"write": IDS, "tokens": N}                    a line for each token, at most N, and null at the end. After each
        token the worker waits for a line: true to go on.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from quantmill import devices, engines
from quantmill.common.program import UserError, parser
from quantmill.quality import teacher_forcing

Continuations = list[list[int]]
Answer = tuple[float, bool]


def score(engine: engines.Engine, entries: Sequence[tuple[list[int], Continuations]], vocab: int) -> Iterator[list]:
    """Yield for each entry the answers of its continuations. `vocab`: tokens of the model; rows of logits may be
    longer. Raises `UserError` for logits that are not finite or too few."""
    if "logits" not in engine.capabilities:
        yield from score_targets(engine, entries)
        return
    texts, counts = [ids for ids, _ in entries], [max(map(len, continuations)) for _, continuations in entries]
    engine.read_ahead(texts)
    logprobs: list[list[np.ndarray]] = []
    for number, chunk in engine.logits_of_last_tokens(texts, counts):
        while number >= len(logprobs):
            if logprobs:
                yield answers(logprobs[-1], entries[len(logprobs) - 1][1], counts[len(logprobs) - 1])
            logprobs.append([])
        place = sum(len(part) for part in logprobs[number])
        logprobs[number].append(read(chunk[:, :vocab], entries[number][1], counts[number], place))
    if len(logprobs) != len(entries):
        raise UserError(f"the engine returned logits of {len(logprobs)} texts, not {len(entries)}")
    yield answers(logprobs[-1], entries[-1][1], counts[-1])


def read(chunk: Any, continuations: Continuations, count: int, place: int) -> np.ndarray:
    """Return of a chunk of logits [n, vocab] the log-probabilities of each continuation's ids and whether they are the
    likeliest: [n, continuations, 2], NaN before a continuation begins. `place`: of the chunk among the last `count`
    positions."""
    if not teacher_forcing.all_finite(chunk):
        raise UserError("the engine returned logits that are not finite; the artifact is broken")
    xp = teacher_forcing.library(chunk)
    found = np.full((len(chunk), len(continuations), 2), np.nan)
    likeliest = teacher_forcing.to_host(chunk.argmax(-1))
    wide = chunk.astype(np.float64) if xp is np else chunk.double()
    largest = wide.max(-1, keepdims=True) if xp is np else wide.amax(-1, keepdim=True)
    sums = xp.log(xp.exp(wide - largest).sum(-1)) + largest[:, 0]
    for column, ids in enumerate(continuations):
        first = max(0, count - len(ids) - place)  # of the chunk's rows
        begin = place + first - (count - len(ids))
        targets = np.array(ids[begin : begin + len(chunk) - first], dtype=np.int64)
        if len(targets):
            rows = np.arange(first, first + len(targets))
            found[first:, column, 0] = teacher_forcing.to_host(wide[rows, targets] - sums[first:])
            found[first:, column, 1] = likeliest[first:] == targets
    return found


def answers(parts: Sequence[np.ndarray], continuations: Continuations, count: int) -> list[Answer]:
    """Return the answers of an entry from all of its chunks. Raises `UserError` if positions are missing."""
    found = np.concatenate(parts)
    if len(found) != count:
        raise UserError(f"the engine returned logits of {len(found)} positions, not {count}")
    mine = (found[count - len(ids) :, column] for column, ids in enumerate(continuations))
    return [(float(each[:, 0].sum()), bool(each[:, 1].all())) for each in mine]


def score_targets(engine: engines.Engine, entries: Sequence[tuple[list[int], Continuations]]) -> Iterator[list[Answer]]:
    """Yield the same from an engine without logits, which scores each continuation separately. Raises `UserError` if it
    does not report its likeliest tokens."""
    texts = [ids[: len(ids) + 1 - len(each)] + each for ids, continuations in entries for each in continuations]
    told = engine.target_logprobs_batch(texts)
    for _, continuations in entries:
        found = []
        for continuation in continuations:
            mine, last = next(told), len(continuation)
            if not mine.top_ids.size:
                raise UserError("the engine does not report its likeliest tokens, so its own answer is unknown")
            greedy = mine.logprobs[-last:] >= mine.top_logprobs[-last:, 0]
            found.append((float(mine.logprobs[-last:].sum()), bool(greedy.all())))
        yield found


def write(engine: engines.Engine, ids: list[int], tokens: int, lines: Iterator[str], out: TextIO) -> None:
    """Send each token as it comes, until the caller wants no more. Raises `UserError` if the engine cannot decode."""
    if engine.no_decoding:
        raise UserError(f"{engine.name} cannot decode: {engine.no_decoding}")
    for _, token, _ in engine.decode([ids], tokens):
        tell(out, token)
        if not json.loads(next(lines)):
            break
    tell(out, None)


def tell(out: TextIO, content: Any) -> None:
    """Send one line to the caller."""
    out.write(json.dumps(content) + "\n")
    out.flush()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("artifact", type=Path)
    arguments.add_argument("--vocab", type=int, required=True, help="tokens of the model's vocabulary")
    engines.add_arguments(arguments)
    options = arguments.parse_args()

    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print too
    device = devices.resolve(options.device, gpus=options.gpus)
    engine = engines.load(options.engine, options.artifact, device, options.threads, options.gpus, **options.options)
    facts = {"compute_type": engine.compute_type, "versions": engine.versions()}
    facts |= {"device": devices.describe(device, engine.threads or options.threads)}
    tell(out, facts | {"capabilities": sorted(engine.capabilities), "ends": engine.allow_eos()})
    lines = iter(sys.stdin.readline, "")
    for line in lines:
        asked = json.loads(line)
        if "write" in asked:
            write(engine, asked["write"], asked["tokens"], lines, out)
            continue
        for found in score(engine, asked["score"], options.vocab):
            tell(out, found)
    engine.close()
