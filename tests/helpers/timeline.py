"""When a server's tokens are due, computed exactly: the truth that figures are held against.

TTFT = a + b x prompt tokens + the wait for a slot; TPOT = c + d x requests in slots. S slots, first come first served.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

STEPS = (1, 3, 2, 4)  # tokens of each step where a draft is accepted


class Clock(Protocol):
    """The part of an event loop that the engine needs."""

    def time(self) -> float: ...

    def call_at(self, when: float, call: Callable[..., Any], *args: Any) -> Any: ...


class Heap:
    """A clock for a simulation without an event loop."""

    def __init__(self) -> None:
        self.now, self.calls, self.order = 0.0, [], count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., Any], *args: Any) -> None:
        heapq.heappush(self.calls, (when, next(self.order), call, args))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.calls:
            self.now, _, call, args = heapq.heappop(self.calls)
            call(*args)


@dataclass
class Job:
    """A request in the engine. `emit` is called with the number of tokens of each step, and whether it is the last."""

    prompt: int
    new_tokens: int
    emit: Callable[[int, bool], None] = lambda tokens, last: None
    cached: int = 0
    arrival: float = 0.0
    due: list[float] = field(default_factory=list)  # when each token was due
    written: list[float] = field(default_factory=list)  # when a server wrote each, which on a busy machine is later


@dataclass
class Engine:
    """S slots and four constants (seconds), and what can be wrong with them.

    `speed(now)` multiplies every time; `cliff` is what the first step of a batch size costs more; nothing is done in
    `stall`, from a time to another; `speculate` makes steps of several tokens.
    """

    clock: Clock
    a: float = 0.02
    b: float = 0.0001
    c: float = 0.004
    d: float = 0.0005
    slots: int = 16
    cliff: float = 0.0
    stall: tuple[float, float] = (0.0, 0.0)
    speculate: bool = False
    speed: Callable[[float], float] = lambda now: 1.0
    waiting: list[Job] = field(default_factory=list)
    running: int = 0
    largest: int = 0
    jobs: list[Job] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def submit(self, job: Job) -> None:
        """Accept a request."""
        job.arrival = self.clock.time()
        self.jobs.append(job)
        self.waiting.append(job)
        self._admit(job.arrival)

    def _admit(self, now: float) -> None:
        while self.waiting and self.running < self.slots:
            job = self.waiting.pop(0)
            self.running += 1
            first = (self.a + self.b * (job.prompt - job.cached)) * self.speed(now)
            self._at(now + first, job, iter(STEPS * job.new_tokens if self.speculate else (1,) * job.new_tokens))

    def _at(self, due: float, job: Job, steps: Iterator[int]) -> None:
        start, end = self.stall
        due = end if start <= due < end else due
        self.clock.call_at(due, self._step, due, job, steps)

    def _step(self, due: float, job: Job, steps: Iterator[int]) -> None:
        first = not job.due
        tokens = 1 if first else min(next(steps), job.new_tokens - len(job.due))
        if self.speculate and not first:
            self.drafted += 3
            self.accepted += tokens - 1
        job.due += [due] * tokens
        last = len(job.due) == job.new_tokens
        job.emit(tokens, last)
        if last:
            self.running -= 1
            self._admit(due)
            return
        gap = (self.c + self.d * self.running) * self.speed(due)
        if self.running > self.largest:
            self.largest = self.running
            gap += self.cliff
        self._at(due + gap, job, steps)
