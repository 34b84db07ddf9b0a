"""The loads of a study: requests and their times, which do not depend on the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantmill.client.checks import LoadRequest
from quantmill.client.schedule import Closed, Load, Poisson, burst
from quantmill.common.program import UserError
from quantmill.loads import prompts
from quantmill.metrics.serving import WINDOW_REQUESTS
from quantmill.tokens.files import Tokens

# requests of each slot; the first is before the window and the last is the drain (metrics.serving.window)
PER_SLOT = WINDOW_REQUESTS + 3
WARM_UP_PROMPT = 32  # tokens
PROBE_TOKENS = 12


@dataclass(frozen=True)
class PlannedLoad:
    """One load. `slots`: requests kept in flight; `rate`: requests/s of a schedule with that hash; a burst has none."""

    name: str
    asked: list[LoadRequest]
    load: Load
    slots: int | None = None
    rate: float | None = None
    schedule_sha256: str | None = None

    @property
    def together(self) -> int:
        """The largest batch that the load makes for certain."""
        return self.slots or (len(self.asked) if self.rate is None else 1)


class Plan:
    """All loads of a study for one model."""

    def __init__(self, asked: Mapping[str, Any], evaluation: Tokens, texts: Sequence[list[int]], seed: int) -> None:
        """
        Args:
            asked: the study's `loads`.
            evaluation: the text that prompts are cut from.
            texts: ids of the burst's prompts.

        Raises:
            UserError: if a prompt and its new tokens exceed the model's context, or texts are too short.
        """
        self.asked, self.ids, self.seed = asked, evaluation.ids, seed
        self.prefix = [] if evaluation.bos_id is None else [evaluation.bos_id]
        self.context = evaluation.context
        self.used: list[list[int]] = []
        self.loads: list[PlannedLoad] = []
        if asked["burst"]:
            self._plan_burst(texts)
        for slots in asked["concurrency"]:
            requests = stagger(self._cut(PER_SLOT * slots), slots)
            self.loads.append(PlannedLoad(f"concurrency-{slots}", requests, Closed(slots), slots=slots))
        self.scheduled = self._cut(asked["requests"]) if asked["rates"] or asked["goodput"] else []
        self.loads += [self.at_rate(rate) for rate in asked["rates"]]

    def _plan_burst(self, texts: Sequence[list[int]]) -> None:
        number = self.asked["burst"]
        if number > len(texts):
            raise UserError(f"loads.burst: {number} prompts, and its text holds {len(texts)}; lower it, or add more")
        lengths = prompts.draw_lengths(self.asked["new_tokens"], number, self.seed)
        asked = [LoadRequest(ids, n) for ids, n in zip(texts[:number], lengths, strict=True)]
        self._check(asked)
        self.loads.append(PlannedLoad(f"burst-{number}", asked, burst(number)))
        self.used += [each.prompt for each in asked]

    def _cut(self, number: int) -> list[LoadRequest]:
        """Cut requests from the text. No prompt shares its beginning with an earlier one."""
        sizes = prompts.draw_lengths(self.asked["prompt_tokens"], number, self.seed)
        lengths = prompts.draw_lengths(self.asked["new_tokens"], number, self.seed + 1)
        cut = prompts.cut_prompts(self.ids, sizes, seed=self.seed, prefix=self.prefix, others=self.used)
        asked = [LoadRequest(ids, n) for ids, n in zip(cut, lengths, strict=True)]
        self._check(asked)
        self.used += cut
        return asked

    def _check(self, asked: Sequence[LoadRequest]) -> None:
        longest = max(len(each.prompt) + each.new_tokens for each in asked)
        if self.context and longest > self.context:
            raise UserError(
                f"loads: prompt and new tokens are {longest} together, and the model's context is {self.context}; "
                "lower prompt_tokens or new_tokens"
            )

    def check_room(self, room: int) -> None:
        """Raise `UserError` for a load whose requests in flight have more tokens than a server's slots share: in the
        mean, each its prompt and half of its answer."""
        for planned in self.loads:
            mean = sum(len(each.prompt) + each.new_tokens / 2 for each in planned.asked) / len(planned.asked)
            if planned.together > 1 and planned.together * mean > room:
                most = planned.together * max(len(each.prompt) + each.new_tokens for each in planned.asked)
                raise UserError(
                    f"loads: the {planned.together} requests of {planned.name} have some "
                    f"{planned.together * mean:.0f} tokens together, and the server's slots share {room}; set options: "
                    f"{{ctx_size: {most}}}"
                )

    def at_rate(self, rate: float) -> PlannedLoad:
        """Plan a load of the study's requests at a rate per second; the seed draws the times."""
        schedule = Poisson.draw(rate, len(self.scheduled), self.seed)
        name = f"rate-{rate:g}"
        return PlannedLoad(name, self.scheduled, schedule.load, rate=schedule.rate, schedule_sha256=schedule.sha256)

    def warm_up(self) -> list[LoadRequest]:
        """Plan a burst that covers every batch size of the loads; its prompts share nothing with theirs."""
        largest = max((each.together for each in self.loads), default=1)
        lengths = prompts.warm_up_lengths(largest)
        room = min(WARM_UP_PROMPT, self.context - max(lengths) if self.context else WARM_UP_PROMPT)
        lengths = lengths if room > len(self.prefix) else [1] * largest
        sizes = [max(room, len(self.prefix) + 1)] * largest
        cut = prompts.cut_prompts(self.ids, sizes, seed=self.seed + 2, prefix=self.prefix, others=self.used)
        return [LoadRequest(ids, n) for ids, n in zip(cut, lengths, strict=True)]

    def probes(self, number: int) -> list[LoadRequest]:
        """Plan requests of short answers to new prompts, as long as the longest of the loads."""
        longest = max((len(each.prompt) for planned in self.loads for each in planned.asked), default=WARM_UP_PROMPT)
        sizes = [longest] * number
        cut = prompts.cut_prompts(self.ids, sizes, seed=self.seed + 3, prefix=self.prefix, others=self.used)
        return [LoadRequest(ids, PROBE_TOKENS) for ids in cut]


def stagger(asked: Sequence[LoadRequest], slots: int) -> list[LoadRequest]:
    """Shorten the answers of the first requests, so that they end one after another. Slots that begin together would
    stay in step if all answers had one length, and every prompt would wait for all others."""
    shares = enumerate(asked[:slots], start=1)
    first = [each._replace(new_tokens=max(2, each.new_tokens * n // slots)) for n, each in shares]
    return [*first, *asked[slots:]]
