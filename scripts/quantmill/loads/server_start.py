"""Put one start of a server under all loads of a plan, and check its answers."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quantmill.client import checks, client, schedule, stream, together
from quantmill.client.checks import Counters, Finding, LoadRequest
from quantmill.devices import host_load, processes
from quantmill.engines.served.served import Served
from quantmill.layouts.compressed_tensors import rounds_activations
from quantmill.loads import agreement, load_checks
from quantmill.loads.plan import Plan, PlannedLoad
from quantmill.metrics.goodput import Goodput, slo_attainment
from quantmill.metrics.goodput import goodput as find_goodput
from quantmill.metrics.serving import Timeline
from quantmill.quality import alignment

CHECKED = 8  # answers of each load that are compared with those of one request at a time, and with likelihoods
SCORED, WINDOW = 8, 256  # texts whose predictions are compared alone and together, and their tokens
# nats per token by which predictions may depend on the server's other work: bfloat16's rounding, and for a format that
# rounds activations three times the shift of a text of SmolLM2 with float8 (benchmarks/rounding_noise.py)
SHIFT, ROUNDED_SHIFT = 5e-3, 5e-2
REPEATED = 5  # prompts that are sent again, to find caches


@dataclass
class LoadResult:
    """One load of one start. `equal`: the share of checked answers with the same tokens as the prompt alone."""

    planned: PlannedLoad
    timelines: list[Timeline]
    findings: list[Finding]
    client: dict[str, float]
    counters: dict[str, float | None]
    events: int
    span: tuple[float, float]  # of the load, by `time.perf_counter()`
    host: host_load.Load | None
    own: list[int]  # process ids of the server and the client
    equal: float | None = None
    conditions: dict[str, Any] = field(default_factory=dict)  # filled in by loads.measure, which samples the device
    interference: list[str] = field(default_factory=list)


@dataclass
class Start:
    """All loads of one start of a server."""

    startup_s: float | None
    findings: list[Finding] = field(default_factory=list)
    loads: list[LoadResult] = field(default_factory=list)
    nll_shift: float | None = None  # nats per token by which predictions depend on load
    goodput: Goodput | None = None
    searched: list[LoadResult] = field(default_factory=list)  # the loads of the search for the goodput


def fingerprint(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, mtime and inode of each file of the artifact. Not the ctime: a build of another format may link
    tokenizer.json meanwhile."""
    stats = {path.name: path.stat() for path in folder.iterdir() if path.is_file() and path.name[0] != "."}
    return {name: (each.st_size, each.st_mtime_ns, each.st_ino) for name, each in stats.items()}


class Loader:
    """A ready server that is put under loads. Raises `UserError` for loads that its context has no room for."""

    def __init__(self, engine: Served, plan: Plan, ceiling: float | None, cpus: frozenset[int]) -> None:
        self.engine, self.plan, self.ceiling, self.cpus = engine, plan, ceiling, cpus
        self.artifact = fingerprint(engine.artifact)
        self.rounds = rounds_activations(engine.artifact)
        if (room := engine.shared_context(plan.context)) is not None:
            plan.check_room(room)

    def send(self, asked: Sequence[LoadRequest], load: schedule.Load) -> tuple[client.Recording, list[stream.Reply]]:
        """Send requests, and read the replies. Raises `UserError` if the server has ended."""
        requests = [self.engine.request(each.prompt, each.new_tokens) for each in asked]
        recording = client.run(self.engine.target, requests, load)
        self.engine.check()
        return recording, self.engine.read(recording)

    def begin(self) -> list[Finding]:
        """Warm up, and check that the server does not cache or sample. Raises `UserError` as `send`."""
        warm_up = self.plan.warm_up()
        self.send(warm_up, schedule.burst(len(warm_up)))
        new, *probes = self.plan.probes(1 + REPEATED)
        ends = [LoadRequest([*each.prompt[:-1], each.prompt[0]], each.new_tokens) for each in probes]
        alone = partial(self.send, load=schedule.Closed(1))
        alone([new])  # the first prompt of a length may take longer
        first, again, longer = (alone(each)[1] for each in (probes, probes, ends))
        found = agreement.check_repeats(first, again, longer)
        told = self.engine.counters().cached_tokens is not None or any(
            reply.usage.cached_tokens is not None for reply in again
        )
        return [each for each in found if not (told and each.fault == "prefix_cached")]  # by counts, not by times

    def run(self, planned: PlannedLoad, check_tokens: bool) -> LoadResult:
        """Put the server under one load. Raises `UserError` as `send`."""
        engine = self.engine
        before, counted = host_load.read(self.cpus, engine.processes()), engine.counters()
        recording, replies = self.send(planned.asked, planned.load)
        # a server may count a request a moment after its answer
        counted = self._settle(counted, sum(reply.tokens or 0 for reply in replies))
        after = host_load.read(self.cpus, engine.processes())
        timelines = [stream.timeline(reply) for reply in replies]
        findings = checks.check_replies(replies, planned.asked)
        findings += checks.check_counters(counted, replies, cache_off=True)
        findings += load_checks.check_load(timelines, planned.slots)
        findings += load_checks.check_client(recording, timelines, self.ceiling, planned.rate is not None)
        findings += load_checks.check_artifact(self.artifact, fingerprint(engine.artifact))
        loaded = LoadResult(
            planned,
            timelines,
            findings,
            {
                "cpu_fraction": recording.cpu_seconds / recording.seconds,
                "events_per_second": recording.arrivals / recording.seconds,
                "longest_stall_ms": recording.longest_stall * 1000,
                "schedule_lag_ms_p99": float(np.percentile(recording.lags or [0.0], 99)) * 1000,
            },
            vars(counted),
            events=sum(len(reply.events) for reply in replies),
            span=(recording.start, recording.end),
            host=host_load.load(before, after, len(self.cpus)),
            own=sorted({os.getpid(), *processes.tree(engine.processes())}),
        )
        if check_tokens and not any(each.refuses for each in checks.check_replies(replies, planned.asked)):
            self._check_tokens(loaded, replies)
        return loaded

    def _settle(self, before: Counters, expected: float) -> Counters:
        """Return the growth of the server's counters, once they include all tokens or a second later."""
        deadline = time.monotonic() + 1.0
        while True:
            counted = self.engine.counters().since(before)
            if counted.generated_tokens in (None, expected) or time.monotonic() > deadline:
                return counted
            time.sleep(0.05)

    def _check_tokens(self, loaded: LoadResult, replies: Sequence[stream.Reply]) -> None:
        """Compare some answers with those of the same prompts alone, and with likelihoods."""
        asked = loaded.planned.asked
        places = sorted({round(place) for place in np.linspace(0, len(asked) - 1, CHECKED)})
        some = [replies[place] for place in places]
        _, alone = self.send([asked[place] for place in places], schedule.Closed(1))
        alone = [replace(reply, number=place) for place, reply in zip(places, alone, strict=True)]
        ids = {reply.number: reply.ids for reply in alone if reply.ok and reply.ids}
        pairs = [(reply.ids, ids[reply.number]) for reply in some if reply.ok and reply.ids and reply.number in ids]
        loaded.equal = sum(mine == theirs for mine, theirs in pairs) / len(pairs) if pairs else None
        if "target_logprobs" not in self.engine.capabilities:
            message = (
                f"the server reports no log-probabilities: {CHECKED} answers were compared with the same ones alone"
            )
            loaded.findings.append(Finding("tokens_not_judged", message, refuses=False))
            return
        prompts = [each.prompt for each in asked]
        loaded.findings += agreement.check_tokens(some, alone, prompts, self.behind, self.rounds)

    def score(self) -> float | None:
        """Return how far, in nats per token, log-probabilities of texts that are scored together are from those of each
        text alone: the mean of all texts. None if the server reports no log-probabilities."""
        if "target_logprobs" not in self.engine.capabilities:
            return None
        size = min(WINDOW, self.plan.context or WINDOW, len(self.plan.ids) // SCORED)
        texts = [self.plan.ids[place * size : (place + 1) * size] for place in range(SCORED)]
        alone = [self.engine.target_logprobs(text).logprobs.mean() for text in texts]
        found = together.each(self.engine.target_logprobs, texts, SCORED)
        return float(np.abs(np.subtract([each.logprobs.mean() for each in found], alone)).mean())

    def behind(self, prompt: Sequence[int], chosen: Sequence[int]) -> Sequence[float]:
        """Return how many nats each token is behind the likeliest, as the server predicts one text at a time."""
        found = alignment.gaps_of_targets(self.engine, list(prompt), list(chosen))
        return [0.0] * len(chosen) if found is None else found.tolist()


def run(
    loader: Loader, startup_s: float | None, first: bool, limits: Mapping[str, float], say: Callable[[str], None]
) -> Start:
    """Run all loads of a plan. Only the `first` start of a server compares tokens, and searches for the goodput if the
    study asks for it."""
    start = Start(startup_s, loader.begin())
    for planned in loader.plan.loads:
        say(planned.name)
        start.loads.append(loader.run(planned, check_tokens=first))
    start.nll_shift = loader.score() if first else None
    limit = ROUNDED_SHIFT if loader.rounds else SHIFT
    if start.nll_shift is not None and start.nll_shift > limit:
        words = f"the server's predictions depend on its other requests, by {start.nll_shift:.2g} nats a token"
        start.findings.append(Finding("load_dependent", words))
    if first and loader.plan.asked["goodput"]:

        def met(rate: float) -> tuple[int, int]:
            say(f"rate {rate:.4g}")
            loaded = loader.run(loader.plan.at_rate(rate), check_tokens=False)
            start.searched.append(loaded)
            return slo_attainment(loaded.timelines, limits["ttft_ms"] / 1000, limits["tpot_ms"] / 1000)

        start.goodput = find_goodput(met, _first_rate(start))
    return start


def _first_rate(start: Start) -> float:
    """Return half of the most requests/s that the server answered while it was busy; 1 without such a load."""
    busy = [each.timelines for each in start.loads if each.planned.rate is None]
    spans = [max(t.end for t in each) - min(t.intended for t in each) for each in busy]
    rates = [len(each) / span for each, span in zip(busy, spans, strict=True) if span > 0]
    return max(rates, default=2.0) / 2
