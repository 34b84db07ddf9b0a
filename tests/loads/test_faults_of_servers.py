"""Each fault of a server or of the client is named by its own message, and a healthy server by none."""

import json
import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from study import NEW, REQUESTS, SLOTS, Study, names, notes, prompt

from quantmill.client import checks, stream
from quantmill.client.checks import Counters, Finding, LoadRequest
from quantmill.client.client import Recording
from quantmill.client.connection import TIMED_OUT
from quantmill.client.schedule import Closed, Poisson, burst
from quantmill.common import atomic
from quantmill.devices import cpu
from quantmill.loads import load_checks, prompts, server_start
from quantmill.metrics.serving import Timeline
from quantmill.report.load_columns import LOAD_COLUMNS
from quantmill.servers import vllm_settings


@pytest.mark.parametrize("dialect", ["completions", "llama"])
def test_a_healthy_server_has_nothing_to_be_named(dialect: str) -> None:
    study = Study(dialect=dialect)
    assert study.alone() + study.load() + study.agree("load") == []
    assert Study().load(Poisson.draw(20.0, REQUESTS, seed=1).load) == []


ANSWERS = {
    "short": ("short", "80 of 80 answers have fewer tokens than were asked for: 15 of 16"),
    "long": ("long", "80 of 80 answers have more tokens than were asked for: 17 of 16"),
    "eos": ("ended_early", "ended with 'stop' instead of 'length': the server does not ignore the end of sequence"),
    "cut": ("cut", "80 of 80 answers have a stream that was cut before its end: the connection was lost"),
    "cut_quietly": ("cut", "have a stream that was cut before its end: no end of the stream"),
    "error": ("error_inside", "have status 200 and an error inside: CUDA error: an illegal memory access"),
    "one_chunk": ("one_event", "came in one event: the server does not stream, and has no TTFT and no TPOT"),
    "usage_lies": ("usage_differs", "have a wrong usage: 18 tokens where 16 came"),
    "prefix_cache_told": ("cached", "tokens of prompts came out of the"),
    "bos": ("token_added", "tokens of its own before the prompt (a beginning of sequence?): it read 41 tokens for 40"),
    "left_cut": ("prompt_cut", "the server cuts prompts on the left: it read 8 tokens for 40"),
    "acceptance": ("acceptance", "the server's count of accepted tokens is wrong"),
    "rejects": ("rejected", "26 of 80 answers were rejected with status 429 and 503"),
    "serial": ("serial", "the server answered one request at a time while 4 were in flight"),
}


@pytest.mark.parametrize("fault", ANSWERS)
def test_a_fault_of_the_answers_is_named(fault: str) -> None:
    name, message = ANSWERS[fault]
    study = Study(fault)
    if fault == "prefix_cache_told":
        study.load()
    found = study.load()
    assert names(found) == {name}
    assert message in next(finding.message for finding in found if finding.fault == name)


@pytest.mark.parametrize(("told", "faults"), [(13, {"short"}), (14, set()), (18, set()), (19, {"long"}), (None, set())])
def test_tokens_without_ids_are_counted_as_asked(told: int | None, faults: set[str]) -> None:
    """By its own count, which may be two off: text-generation-webui counts the tokens of its text again."""
    asked = [LoadRequest(prompt(place), NEW) for place in range(4)]
    _, replies = Study("cumulative").send(asked, Closed(SLOTS))
    for reply in replies:
        reply.usage = reply.usage._replace(new_tokens=told)
    found = checks.check_replies(replies, asked)
    assert names(found) == faults
    assert "no_ids" in notes(found)


def test_answers_in_one_event_are_a_slow_server() -> None:
    asked = [LoadRequest(prompt(place), NEW) for place in range(100)]
    healthy, whole = (Study(*faults).send(asked, Closed(SLOTS))[1] for faults in ((), ("one_chunk",)))
    (found,) = checks.check_replies([*whole[:1], *healthy[1:]], asked)
    assert not found.refuses
    assert found.message == "1 of 100 answers came in one event: the server does not keep up, and these have no TPOT"
    (found,) = checks.check_replies([*whole[:2], *healthy[2:]], asked)
    assert found.refuses
    assert found.message.startswith("2 of 100 answers came in one event: the server does not stream")


NOTES = {
    "chunks": ({"many_tokens_an_event"}, "events of several tokens, 4.0 in the mean: gaps are those of events"),
    "split": ({"split", "split_utf8"}, "packets ended inside a character"),
    "cumulative": ({"cumulative", "no_ids"}, "events repeat the earlier text; only new text counts"),
    "pings": ({"pings", "empty"}, "comments were in the streams; they are not tokens"),
    "no_usage": ({"no_usage"}, "80 of 80 answers report no usage"),
    "speculation": ({"many_tokens_an_event"}, "events of several tokens"),
}


@pytest.mark.parametrize("fault", NOTES)
def test_what_is_borne_is_noted(fault: str) -> None:
    expected, message = NOTES[fault]
    found = Study(fault).load()
    assert (names(found), notes(found)) == (set(), expected)
    assert any(message in finding.message for finding in found)


TIMES: dict[str, tuple[dict[str, Any], str, str]] = {
    "stall": ({"stall": (1.0, 3.0)}, "stall", "the server stalled for 2.0 s, 1.0 s after the start"),
    "cliff": ({"cliff": 1.5}, "cliff", "took 1.51 s: warm up with every batch size"),
}


@pytest.mark.parametrize("fault", TIMES)
def test_a_server_that_works_unevenly_is_named(fault: str) -> None:
    engine, name, message = TIMES[fault]
    found = Study(**engine).load()
    assert names(found) == {name}
    assert message in found[0].message


def test_a_cliff_is_gone_after_a_warm_up() -> None:
    study = Study(cliff=1.5)
    lengths = prompts.warm_up_lengths(SLOTS)
    study.send([LoadRequest(prompt(5000 + place), length) for place, length in enumerate(lengths)], burst(SLOTS))
    assert study.load() == []


def together(number: int, first: float, steps: list[float]) -> Timeline:
    times = tuple(accumulate(steps, initial=first))
    return Timeline(number, 0.0, 0.0, times[-1], times, (1.0,) * len(times))


def test_prefill_of_others_is_not_a_cliff() -> None:
    """Send tokens as vLLM does for 64 requests at once: four prompts, then sixty in 0.3 s with four second tokens."""
    early = [together(number, 0.05, [0.3] + [0.01] * 40) for number in range(4)]
    late = [together(number, 0.35, [0.01] * 20) for number in range(4, 64)]
    assert load_checks.check_load(early + late, 64) == []
    alone = [together(number, 0.05, [0.3] + [0.01] * 40) for number in range(4)]
    assert names(load_checks.check_load(alone, 4)) == {"cliff"}


def test_prefill_of_others_is_not_a_stall() -> None:
    """A CPU with vLLM takes a burst: one prompt in 0.4 s, then 58 in 18 s with its second token."""
    early = together(0, 0.4, [18.0] + [0.7] * 30)
    late = [together(number, 18.4, [0.7] * 30) for number in range(1, 59)]
    assert load_checks.check_load([early, *late]) == []
    (found,) = load_checks.check_load([early, *late[:20]])  # 0.4 s for each of 20 prompts is less
    assert found.message == "the server stalled for 18.0 s, 0.4 s after the start"


@pytest.mark.parametrize(
    ("speed", "word"), [(lambda now: 1 + now / 10, "TPOT grows by"), (lambda now: 2 - now / 10, "TPOT falls by")]
)
def test_a_server_that_drifts_is_unstable(speed: Callable[[float], float], word: str) -> None:
    found = Study(speed=speed).load()
    assert (names(found), notes(found)) == (set(), {"unstable"})
    assert word in found[0].message


def test_a_queue_that_grows_is_unstable() -> None:
    found = Study(slots=2).load(Poisson.draw(40.0, REQUESTS, seed=1).load)
    assert notes(found) == {"unstable"}
    assert "requests in flight grows by" in found[0].message or "TTFT grows by" in found[0].message


def test_a_client_that_reads_slowly_is_named() -> None:
    study = Study()

    def clock() -> float:  # each look at it takes most of a millisecond of the only thread
        study.loop.now += 0.0012
        return study.loop.now

    found = study.load(clock=clock)
    assert names(found) == {"slow_reader"}
    assert found[0].message.startswith("the client stalled for ")
    assert found[0].message.endswith("% of the time: give it a core of its own")


def test_a_clock_that_is_set_changes_no_figure() -> None:
    study = Study()
    times = iter((1000.0, 940.0))
    found = study.load(calendar=lambda: next(times))
    assert (names(found), notes(found)) == (set(), {"clock_step"})
    assert "the host's clock was set by" in found[0].message
    assert "no figure depends on it" in found[0].message


def test_a_client_at_its_limits_is_refused() -> None:
    study = Study()
    recording, replies = study.send([LoadRequest(prompt(place), NEW) for place in range(20)], Closed(4))
    timelines = [stream.timeline(reply) for reply in replies]
    told = {"cpu_seconds": 0.0, "stall_seconds": 0.0, "longest_stall": 0.0, "clock_step": 0.0}

    def check(ceiling: float | None = 1e6, late: float = 0.0, **changes: float) -> list[Finding]:
        exchanges = recording.exchanges
        for exchange in exchanges:
            exchange.intended = exchange.taken - late
        made = Recording(exchanges, recording.start, recording.end, **told | changes)
        return load_checks.check_client(made, timelines, ceiling, scheduled=True)

    assert check() == check(ceiling=None) == []
    (cpu,) = check(cpu_seconds=0.6 * recording.seconds)
    assert cpu.message == "the client took 60% of a core, of at most 50%"
    (ceiling,) = check(ceiling=1.9 * recording.arrivals / recording.seconds)
    assert "more than half of the" in ceiling.message
    (lag,) = check(late=0.0005)  # TPOT is 6 ms, of which 5% are 0.3
    assert lag.message == "requests were sent up to 0.50 ms late (p99), of at most 0.30: the client lags"
    assert check(late=0.0002) == []


@pytest.mark.parametrize(
    ("features", "slow"),
    [
        (["avx2", "avx512_bf16"], True),
        (["avx512_fp16"], False),
        (["asimd", "asimdhp"], False),
        (["asimd"], True),
        ([], False),
    ],
)
def test_float16_without_hardware_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: list[str], slow: bool
) -> None:
    monkeypatch.setattr(cpu, "features", lambda: features)
    notes = next(column for column in LOAD_COLUMNS if column.name == "notes")
    load = {"findings": [{"message": "an even load", "refuses": False}, {"message": "a fault", "refuses": True}]}
    found = notes.value({"measured": {"versions": vllm_settings.products(tmp_path, "cpu", "float16")}, "load": load})
    said = "its float16 products are not among this processor's own: dtype: bfloat16 may be several times as fast"
    assert found == ([said] if slow else []) + ["an even load"]
    assert vllm_settings.products(tmp_path, "cuda", "float16") == {}


INT4 = {"num_bits": 4, "type": "int"}


@pytest.mark.parametrize(
    ("quantization", "rounded"),
    [
        ({"quant_method": "gptq", "bits": 4}, True),
        ({"quant_method": "awq", "w_bit": 4}, True),
        ({"quant_method": "gptq", "bits": 8}, False),
        ({"config_groups": {"group_0": {"weights": INT4, "input_activations": None}}}, True),
        ({"config_groups": {"group_0": {"weights": INT4, "input_activations": {"num_bits": 8}}}}, False),
        ({"config_groups": {"group_0": {"weights": INT4 | {"type": "float"}}}}, False),
        ({"config_groups": {"group_0": {"weights": None}}}, False),
        (None, False),
    ],
)
def test_vllms_rounding_with_4_bit_weights_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: dict | None, rounded: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8", raising=False)

    def told(device: str, dtype: str, *, amx: bool) -> dict[str, str]:
        monkeypatch.setattr(cpu, "flags", lambda: {"amx_tile", "avx512_fp16"} if amx else {"avx512_fp16"})
        return vllm_settings.products(tmp_path, device, dtype)

    said = {"int4 products": "round what they multiply to 8 bits (VLLM_CPU_INT4_W4A8)"}
    assert told("cpu", "bfloat16", amx=True) == (said if rounded else {})
    assert told("cpu", "bfloat16", amx=False) == told("cpu", "float16", amx=True) == {}
    assert told("cuda", "bfloat16", amx=True) == {}
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    assert told("cpu", "bfloat16", amx=True) == {}


def test_a_change_of_the_artifact_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    begun = server_start.fingerprint(tmp_path)
    os.utime(tmp_path / "config.json", ns=(1, 1))  # as what is written in place
    (tmp_path / "tokenizer.json").replace(tmp_path / "other.json")
    (changed,) = load_checks.check_artifact(begun, server_start.fingerprint(tmp_path))
    assert changed.message == (
        "the artifact was changed after the server's start: config.json, other.json, tokenizer.json;"
        " start the server again"
    )


def test_a_shared_tokenizer_does_not_change_an_artifact(tmp_path: Path) -> None:
    served, other = tmp_path / "served", tmp_path / "other"
    for folder in (served, other):
        folder.mkdir()
    (served / "tokenizer.json").write_text("{}")
    begun = server_start.fingerprint(served)
    atomic.clone_or_copy(served / "tokenizer.json", other / "tokenizer.json")
    assert load_checks.check_artifact(begun, server_start.fingerprint(served)) == []


def test_counts_of_the_server_that_differ_are_refused() -> None:
    study = Study()
    _, replies = study.send([LoadRequest(prompt(place), NEW) for place in range(4)], Closed(1))
    right = Counters(generated_tokens=64)
    assert checks.check_counters(right, replies, cache_off=True) == []
    (wrong,) = checks.check_counters(Counters(generated_tokens=63), replies, cache_off=True)
    assert wrong.message == "the server counts 63 new tokens where 64 came"
    cached = Counters(generated_tokens=64, cached_tokens=32)
    assert checks.check_counters(cached, replies, cache_off=False) == []
    assert names(checks.check_counters(cached, replies, cache_off=True)) == {"cached"}


def test_abandoned_answers_do_not_fault_the_counters() -> None:
    study = Study("speculation")
    _, replies = study.send([LoadRequest(prompt(place), NEW) for place in range(4)], Closed(1))
    wrote = Counters(generated_tokens=70, drafted=200, accepted=100)
    assert names(checks.check_counters(wrote, replies, cache_off=True)) == {"counter_differs", "acceptance"}
    replies[3].failure = f"{TIMED_OUT} 600 s"
    assert checks.check_counters(wrote, replies, cache_off=True) == []


def test_drafts_beyond_an_answer_may_count() -> None:
    """Count as vLLM does: for each answer at most the tokens of an event except one."""
    study = Study("speculation")
    _, replies = study.send([LoadRequest(prompt(place), NEW) for place in range(4)], Closed(1))
    seen = 4 * NEW - sum(len(reply.events) for reply in replies)
    beyond = sum(max(event.tokens for event in reply.events) - 1 for reply in replies)
    assert seen > 0
    for more, faults in ((0, set()), (beyond, set()), (beyond + 2, {"acceptance"}), (-2, {"acceptance"})):
        accepted = seen + more
        counted = Counters(drafted=10 * NEW, accepted=accepted)
        assert names(checks.check_counters(counted, replies, cache_off=True)) == faults, accepted
