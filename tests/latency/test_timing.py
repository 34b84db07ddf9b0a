"""Measure decoding in one process, and compare the ways to decode."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_engine import Fake

from quantmill.common import manifest
from quantmill.common.program import UserError
from quantmill.latency import variants
from quantmill.latency.decoding import time_tokens
from quantmill.latency.job import LatencyTask, Protocol
from quantmill.latency.measure import Observation, assemble, judge, speculates, summarise
from quantmill.latency.worker import Measurement


def test_known_delays_are_measured() -> None:
    _, tokens, seconds = time_tokens(Fake(delay=0.02), [[1]], 25)
    assert tokens == list(range(25))
    gaps = np.diff([0, *seconds])
    assert gaps.min() >= 0.02
    assert np.median(gaps) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("ahead", [-10.0, 10.0])
def test_impossible_times_are_refused(ahead: float) -> None:
    with pytest.raises(UserError, match="timestamps go backwards"):
        time_tokens(Fake(ahead=ahead), [[1]], 3)


def test_an_engine_that_stops_early_is_refused() -> None:
    with pytest.raises(UserError, match="returned 9 tokens where 10 were asked for"):
        time_tokens(Fake(drop=1), [[1]], 10)


def test_a_batch_that_is_not_whole_is_refused() -> None:
    class Batch:
        """Three prompts for two steps; the second step lacks one."""

        sent = None

        def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
            for number in (0, 1, 2, 0, 1):
                yield number, 7, time.perf_counter()

    with pytest.raises(UserError, match="returned 5 tokens where 2 for each of 3 prompts were asked for"):
        time_tokens(Batch(), [[1], [2], [3]], 2)


def test_a_batchs_step_ends_with_its_last_token() -> None:
    class Uneven:
        """Two prompts, the second of which is ahead: three of its tokens come before the first one's second."""

        sent = None

        def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
            start = time.perf_counter()
            for number, token, after in ((0, 1, 1), (1, 5, 2), (1, 6, 3), (1, 7, 4), (0, 2, 5), (0, 3, 6)):
                time.sleep(0.001)
                yield number, token, start + after / 1e4

    timing = time_tokens(Uneven(), [[1], [2]], 3)
    assert timing.tokens == [1, 5, 2, 6, 3, 7]  # step by step
    assert np.diff(timing.seconds) == pytest.approx([3e-4, 1e-4], abs=1e-6)


def observe(mode: str, seconds: float, *outputs: list[int], gap: float = 0) -> list[Observation]:
    """Return the measurement of a process that decodes a token every `seconds`. `gap`: of its last token."""
    runs = [
        {"process": 0, "repeat": 0, "prompt": number, "token_seconds": [seconds * (i + 1) for i in range(len(tokens))]}
        for number, tokens in enumerate(outputs)
    ]
    said = {"compute_type": "float16", "versions": {}, "threads": 1, "load_seconds": 1.0}
    said |= {"memory_bytes": {"resident": 7, "device": None, "allocated": None}, "batches": []}
    said |= {"decode_phases": [], "measured": (0, 1), "load": None, "own": [], "unchecked": None}
    said |= {"lengths": [{"tokens": 9, "new_tokens": 3, "runs": runs[:1], "outputs": outputs[-1:]}]}
    said |= {"largest_gaps": [0.0] * (len(outputs) - 1) + [gap] if mode == "captured" else None}
    said["lengths"][0] |= {"largest_gap": gap} if mode == "captured" else {}
    said |= {"mode": mode, "modes": ["generate", "captured"], "weight_bytes_per_token": 100}
    said |= {"runs": runs, "outputs": [[tokens] for tokens in outputs]}
    return [Observation(Measurement(**said), {"decode_joules": 8.0}, [f"noise beside {mode}"])]


@pytest.mark.parametrize(
    ("options", "read"),
    [({"speculative_config": {"method": "ngram"}}, 100 / 0.05), ({"spec_tokens": 4}, 100 / 0.05), ({}, 300 / 0.1)],
)
def test_tokens_of_one_step_read_the_weights_once(options: dict[str, object], read: float) -> None:
    """The second and the third token come 50 ms after the first. By speculation two steps read 100 bytes each in 50 ms;
    otherwise one message brought both tokens, and three steps read 300 bytes in 100 ms."""
    (process,) = observe("served", 0.05, [1, 2, 3])
    process.measured.runs[0]["token_seconds"] = [0.05, 0.1, 0.1]
    summary = summarise([process], 1e4, speculates(options))["summary"]
    assert summary["tokens_per_second"] == pytest.approx(3 / 0.1)
    assert summary["bandwidth_fraction"] == pytest.approx(read / 1e4)


@pytest.mark.parametrize(
    ("tokens", "gap", "seconds", "mode", "refused"),
    [
        ([4, 5, 6], 0, 0.01, "captured", None),
        ([4, 5, 6], 0, 0.1, "generate", None),
        ([4, 5, 6], 0.7, 0.01, "captured", None),  # the plain way chooses the same
        ([4, 9, 6], 0.04, 0.01, "captured", None),
        ([4, 9, 6], 0.7, 0.01, "generate", "its tokens differ from those of generate after prompt 2, from token 2 on"),
    ],
)
def test_another_way_counts_if_only_ties_differ(
    tmp_path: Path, tokens: list[int], gap: float, seconds: float, mode: str, refused: str | None
) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    manifest.write(tmp_path, format="fake", tool="fake", tool_version="1")
    text = {"prompts": [{"text": "a", "ids": [1]}, {"text": "b", "ids": [2]}], "text_sha256": "ab"}
    (tmp_path / "prompts.json").write_text(json.dumps(text))
    prompts = tmp_path / "prompts.json"
    protocol = Protocol(3, repeats=1, processes=1, decode="captured", prompt_tokens=[9], batch_sizes=[1])
    job = LatencyTask(
        tmp_path, "fake", {}, 1, "cpu", threads=[1], prompts=prompts, evaluation=prompts, protocol=protocol
    )
    ways = [observe("generate", 0.05, [1, 2, 3], [4, 5, 6]), observe("captured", seconds, [1, 2, 3], tokens, gap=gap)]
    result = assemble(job, ways, [], bandwidth=1e4)
    assert result["mode"] == mode
    assert result["summary"]["tokens_per_second"] == pytest.approx(1 / seconds if mode == "captured" else 20)
    assert result["summary"]["bandwidth_fraction"] == pytest.approx(result["summary"]["tokens_per_second"] / 100)
    assert [prompt["output_ids"] for prompt in result["prompts"]] == [
        [1, 2, 3],
        tokens if mode == "captured" else [4, 5, 6],
    ]
    assert result["interference"] == [f"noise beside {mode} (process 0)"]
    assert result["summary"]["joules_per_token"] == 2  # 8 J in two runs of two tokens after the first
    assert result["summary"]["peak_memory_bytes"] == 7
    assert result["memory_bytes"] == {"resident": 7}
    (other,) = result["other_modes"]
    captured = result if mode == "captured" else other
    assert ("refused" in captured["lengths"][0]) == bool(refused)
    assert other["mode"] != mode
    assert (other["refused"] or "").startswith(refused or "") and bool(other["refused"]) == bool(refused)
    assert bool(captured["differs"]) == (tokens != [4, 5, 6])


@pytest.mark.parametrize(
    ("gap", "refused"), [(0.04, None), (0.7, "its tokens differ from run to run, by up to 0.7 nats")]
)
def test_a_later_run_is_judged_too(gap: float, refused: str | None) -> None:
    plain = {"mode": "generate", "outputs": [[4, 5, 6]], "largest_gaps": [], "deterministic": True}
    captured = plain | {"mode": "captured", "largest_gaps": [gap]}
    assert judge(captured | {"deterministic": False}, plain)["refused"] == refused
    assert judge(captured, plain) == {"refused": None, "differs": None}


def test_the_plain_way_does_not_differ_from_itself() -> None:
    plain = {"mode": "generate", "outputs": [[4, 5, 6]], "largest_gaps": [], "deterministic": False}
    assert judge(plain, plain) == {"refused": None, "differs": None}


@pytest.mark.parametrize(("gap", "refused"), [(0.04, False), (0.7, True)])
def test_later_processes_are_judged_after_long_prompts(gap: float, refused: bool) -> None:
    entries = {
        mode: [
            observe(mode, 0.01, tokens, gap=0 if number == 0 else gap)[0].measured.lengths[0]
            for number, tokens in enumerate(([4, 5, 6], [4, 5, 9] if mode == "captured" else [4, 5, 6]))
        ]
        for mode in ("generate", "captured")
    }
    plain, captured = ([variants.join(each)] for each in entries.values())
    variants.refuse_differences(captured, plain)
    assert ("refused" in captured[0]) == refused


def test_times_begin_when_the_request_is_sent() -> None:
    class Served:
        """Its request takes a while to make."""

        sent = None

        def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
            time.sleep(0.01)
            self.sent = time.perf_counter()
            for step in range(n):
                yield 0, step, self.sent + step * 1e-6

    timing = time_tokens(Served(), [[1]], 3)
    assert timing.seconds == pytest.approx([0, 1e-6, 2e-6], abs=1e-9)
