"""Requests of loads, and errors before and after they run, without a server."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import REPO
from load_study import BURST, IDS, LIMITS, plan

from quantmill.common.program import UserError
from quantmill.engines import Targets, llama_server
from quantmill.layouts.compressed_tensors import rounds_activations
from quantmill.loads.plan import PER_SLOT
from quantmill.loads.server_start import ROUNDED_SHIFT, SHIFT, Loader
from quantmill.loads.server_start import run as run_start
from quantmill.quality.alignment import GAP, TIE


def test_a_plan_sends_what_the_study_asks_for() -> None:
    found = plan(burst=5, concurrency=[1, 4], rates=[2.5], new_tokens=[6, 12])
    burst, one, four, rate = found.loads
    assert [each.name for each in found.loads] == ["burst-5", "concurrency-1", "concurrency-4", "rate-2.5"]
    assert [list(each.prompt) for each in burst.asked] == BURST[:5]
    assert [len(one.asked), len(four.asked), len(rate.asked)] == [PER_SLOT, 4 * PER_SLOT, 40]
    assert {len(each.prompt) for each in four.asked} == {32}
    assert {each.new_tokens for each in four.asked[4:]} <= set(range(6, 13))
    prompts = [tuple(each.prompt[:16]) for planned in found.loads for each in planned.asked]
    prompts += [tuple(each.prompt[:16]) for each in [*found.warm_up(), *found.probes(6)]]
    assert len(set(prompts)) == len(prompts)  # nothing shares a block of a cache
    assert rate.schedule_sha256 == plan(rates=[2.5]).loads[0].schedule_sha256 != found.at_rate(3.0).schedule_sha256


def test_a_load_beyond_the_context_is_refused() -> None:
    found = plan(burst=2, concurrency=[4], new_tokens=12, prompt_tokens=32, rates=[2.0])
    found.check_room(152)  # four times 32 and six
    four = found.loads[1]
    together = 4 * np.mean([len(each.prompt) + each.new_tokens / 2 for each in four.asked])
    assert 148 < together < 152  # the first answers are shorter
    words = r"the 4 requests of concurrency-4 have some 1\d\d tokens together, and the server's slots share 147; "
    with pytest.raises(UserError, match=words + r"set options: {ctx_size: 176}$"):
        found.check_room(147)


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({}, 512),
        ({"ctx_size": 0}, 512),
        ({"ctx_size": 4096}, 4096),
        ({"c": "2048"}, 2048),
        ({"ctx_size": "8k"}, None),  # the server's own affair
    ],
)
def test_llama_servers_slots_share_one_context(
    options: dict[str, Any], room: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_server.files, "first", lambda artifact: artifact / "model.gguf")
    monkeypatch.setattr(llama_server.files, "compute_type", lambda file: "float32")
    monkeypatch.setattr(llama_server.gguf_file, "read_all", lambda path: None)
    monkeypatch.setattr(llama_server.llamacpp, "folder", lambda: tmp_path)
    engine = llama_server.Engine.__new__(llama_server.Engine)
    engine.command(tmp_path, "cpu", 1, 8000, options)
    assert engine.shared_context(512) == room


@pytest.mark.parametrize(
    ("words", "rounds"),
    [
        ({"config_groups": {"group_0": {"input_activations": {"num_bits": 8}}}}, True),
        ({"config_groups": {"group_0": {"input_activations": None}}}, False),
        ({"config_groups": [1]}, False),
        ({"config_groups": {"group_0": "x"}}, False),
        ("fp8", False),
        (None, False),
    ],
)
def test_whether_a_config_says_that_activations_are_rounded(words: object, rounds: bool, tmp_path: Path) -> None:
    assert not rounds_activations(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": words}))
    assert rounds_activations(tmp_path) == rounds


def test_the_page_names_the_codes_limits() -> None:
    page = " ".join((REPO / "docs/SERVING.md").read_text().split())
    assert f"tokens more than {TIE} nats behind the likeliest that the server itself predicts" in page
    assert f"further than {SHIFT} nats a token from those of the same texts alone" in page
    assert f"their tokens may be {GAP} nats behind in the mean" in page
    assert f"their texts may move by {ROUNDED_SHIFT} nats a token" in page


def test_slots_that_begin_together_do_not_stay_in_step() -> None:
    (four,) = plan(concurrency=[4], new_tokens=100).loads
    assert [each.new_tokens for each in four.asked[:6]] == [25, 50, 75, 100, 100, 100]


@pytest.mark.parametrize(
    ("evaluation", "serving", "message"),
    [
        ({}, {"burst": 13}, r"^loads.burst: 13 prompts, and its text holds 12; lower it, or add more$"),
        ({"context": 40}, {"concurrency": [1]}, r"^loads: prompt and new tokens are 44 together, and the model's"),
        ({"ids": IDS[:40]}, {"concurrency": [4]}, r"^the text of 40 tokens has no \d+ prompts that begin differently"),
        ({"ids": IDS[:20]}, {"concurrency": [4]}, r"^a prompt of 32 tokens is longer than the text \(20\)"),
    ],
)
def test_what_cannot_be_sent_is_one_line(evaluation: dict[str, Any], serving: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(evaluation, **serving)


@pytest.mark.parametrize(("shift", "found"), [(0.0, 0.0), (0.25, 0.25)])
def test_predictions_that_depend_on_load_are_measured(shift: float, found: float) -> None:
    barrier = threading.Barrier(8)

    class Shaky:
        capabilities = frozenset({"target_logprobs"})
        alone = 8  # texts that are scored one at a time, before those that are together

        def target_logprobs(self, ids: list[int]) -> Targets:
            together = self.alone == 0
            if together:
                barrier.wait(20)
            else:
                self.alone -= 1
            none = np.empty((len(ids) - 1, 0))
            return Targets(np.full(len(ids) - 1, -1.0 - shift * together), none, none)

    loader = Loader.__new__(Loader)
    loader.engine, loader.plan = Shaky(), plan(concurrency=[2])
    assert loader.score() == pytest.approx(found)


@pytest.mark.parametrize(
    ("shift", "rounds", "refused"),
    [(0.004, False, False), (0.006, False, True), (0.006, True, False), (0.04, True, False), (0.06, True, True)],
)
def test_predictions_may_shift_by_rounding(shift: float, rounds: bool, refused: bool) -> None:
    nothing = SimpleNamespace(loads=[], asked={"goodput": False})
    loader = SimpleNamespace(begin=list, plan=nothing, score=lambda: shift, rounds=rounds)
    found = run_start(loader, 1.0, True, LIMITS, print)
    assert found.nll_shift == shift
    assert [each.fault for each in found.findings] == ["load_dependent"] * refused
