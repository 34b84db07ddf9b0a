"""An engine whose delays and faults are known: a small language model of numpy that waits until each token is due.

Its artifact's fake.json holds what it does: `prefill` seconds for each token of a prompt, `step` seconds a token after
the first, `fault`, one of `FAULTS` or none, `tells`, what it has of logits and target_logprobs (logits unless said),
`top`, how many likeliest tokens the latter tells, `other_way`, why its other way to decode does not fit the model, and
`no_decoding`, why it does not decode.
Its logits are those of the last two tokens, so that a token more before a short prompt changes what follows it.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from quantmill import engines
from quantmill.metrics.footprint import Cache, Footprint, Layers

VOCAB = 40
BOS = 0
SPIN = 0.002  # seconds
FAULTS = ("fewer", "bos", "bos-in-logits", "bos-row", "bos-shifts", "bos-in-decoding", "late", "early", "random-tokens")


def model(ids: list[int], noise: float = 0.0) -> np.ndarray:
    """Logits [len(ids), VOCAB]."""
    last, before = np.random.default_rng(1).normal(0, 3, (2, VOCAB, VOCAB))
    last = last + noise * np.random.default_rng(2).normal(0, 1, (VOCAB, VOCAB))
    logits = last[ids]
    logits[1:] += before[ids[:-1]]
    return logits.astype(np.float32)


class Engine(engines.Engine):
    """See `engines.Engine`."""

    capabilities = frozenset({"logits", "batches"})
    compute_type, modes, mode = "float32", ("fake",), "fake"
    stop_ids: tuple[int, ...] = ()

    def __init__(self, artifact: Path, device: str, threads: int, step: float | None = None) -> None:
        does = json.loads((artifact / "fake.json").read_text())
        self.prefill, self.step = does.get("prefill", 0.0), does.get("step", 0.0) if step is None else step
        self.noise, self.fault = does.get("noise", 0.0), does.get("fault")
        self.other_way, self.top = does.get("other_way"), does.get("top", 0)
        self.no_decoding = does.get("no_decoding")
        if "tells" in does:
            self.capabilities = frozenset({"batches", *does["tells"]})
        self.modes = ("fake", "other") if self.other_way else ("fake",)
        assert self.fault is None or self.fault in FAULTS

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        if self.mode == "other" and len(prompts) == 1:
            raise engines.CannotDecode(self.other_way)
        due = time.perf_counter() + self.prefill * len(prompts[0])
        texts = [list(ids) for ids in prompts]
        for number in range(n - (self.fault == "fewer")):
            added = [BOS] if self.fault in ("bos", "bos-in-decoding") else []
            chosen = [int(model(added + text, self.noise)[-1].argmax()) for text in texts]
            if self.fault == "random-tokens":
                chosen = [(token + number) % VOCAB for token in chosen]
            # sleep comes late; a process that spins has used up its share of a busy processor when the token is due
            time.sleep(max(0.0, due - time.perf_counter() - SPIN))
            while time.perf_counter() < due:
                pass
            now = time.perf_counter()
            for sequence, token in enumerate(chosen):
                yield sequence, token, now
            due += self.step
            for text, token in zip(texts, chosen, strict=True):
                text.append(token)

    def logits(self, ids: list[int]) -> Iterator[np.ndarray]:
        with_bos, plain = model([BOS, *ids], self.noise), model(ids, self.noise)
        rows = {
            "bos": with_bos[1:],
            "bos-in-logits": with_bos[1:],
            "bos-row": with_bos,
            "bos-shifts": with_bos[:-1],
            "late": np.concatenate([plain[:1], plain[:-1]]),
            "early": np.concatenate([plain[1:], plain[-1:]]),
        }.get(self.fault, plain)
        yield from np.array_split(rows, 2)

    def target_logprobs(self, ids: list[int]) -> engines.Targets:
        rows = (model([BOS, *ids], self.noise)[1:] if self.fault == "bos" else model(ids, self.noise)).astype(float)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        found = rows[np.arange(len(ids) - 1), ids[1:]]
        shifted = {"late": [found[:1], found[:-1]], "early": [found[1:], found[-1:]]}
        likeliest = np.argsort(-rows[:-1], axis=1)[:, : self.top]
        told = np.concatenate(shifted[self.fault]) if self.fault in shifted else found
        return engines.Targets(told, likeliest, np.take_along_axis(rows[:-1], likeliest, axis=1))

    def weight_bytes(self) -> int:
        return VOCAB * VOCAB * 8

    def footprint(self) -> Footprint:
        return Footprint(VOCAB * VOCAB * 8, Cache([Layers(2, 3.0)], page=4))

    def versions(self) -> dict[str, str]:
        return {"fake": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "unset")}
