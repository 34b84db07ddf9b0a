"""The harness measured: an engine of known delays must come out right, one of known faults must be named.

Programs run whole, in processes of their own, with the engine of tests/helpers/harness/engines/fake.py in place of a
real one.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPO, line_of_refusal
from program_fixtures import Program, Result

from quantmill.common import manifest
from quantmill.common.program import UserError
from quantmill.gate import fidelity
from quantmill.metrics import footprint
from quantmill.metrics.footprint import Cache, Footprint, Layers
from quantmill.quality import alignment, teacher_forcing

sys.path.append(str(REPO / "tests/helpers/harness/engines"))
import fake

PREFILL, STEP = 0.01, 0.06  # seconds a token; long beside what a busy machine makes a token late by
NEW_TOKENS = 10
WITHIN = 0.01


IDS = np.random.default_rng(3).integers(fake.VOCAB, size=500).tolist()


def make_engine(folder: Path, **does: Any) -> fake.Engine:
    """Make an artifact of the fake engine, and load it in this process."""
    folder.mkdir(exist_ok=True)
    (folder / "fake.json").write_text(json.dumps(does))
    (folder / "config.json").write_text(json.dumps({"bos_token_id": fake.BOS, "vocab_size": fake.VOCAB}))
    return fake.Engine(folder, "cpu", 1)


@pytest.fixture
def harness(tmp_path: Path, run_harness: Program) -> Callable[..., Result]:
    """Run a program on a fake artifact; the tokens that it takes are in the same folder."""
    prompts = [{"text": str(size), "ids": IDS[size : 2 * size]} for size in (30, 60)]
    shared = {"context": 120, "text_sha256": "x", "bytes": 1, "words": 1}
    (tmp_path / "prompts.json").write_text(json.dumps({"prompts": prompts, **shared}))
    (tmp_path / "evaluation.json").write_text(json.dumps({"ids": IDS, **shared, "context": 50}))

    def run(program: str, out: str, does: dict[str, Any], *options: object) -> Result:
        artifact = tmp_path / f"artifact-{out}"
        make_engine(artifact, **does)
        (artifact / manifest.NAME).unlink(missing_ok=True)
        manifest.write(artifact, format="fake", tool="fake", tool_version="1")
        more = ["--evaluation", tmp_path / "evaluation.json", "--threads", 1, *options]
        return run_harness(program, artifact, tmp_path / out, "--engine", "fake", "--device", "cpu", *more)

    return run


def expect(tmp_path: Path, protocol: str = "gptq-2048") -> Path:
    """Write expected.json, by an engine without faults and noise."""
    engine = make_engine(tmp_path / "plain")
    text = teacher_forcing.read_text(tmp_path / "evaluation.json", protocol).first(8)
    found = fidelity.Predictions(engine, text)
    content = {"protocol": protocol, "perplexity": found.perplexity, "windows": len(text.windows)}
    content |= {"against": "the source's weights", "compared_perplexity": found.perplexity}
    content["compute_type"] = "float32"
    content |= alignment.examine(engine, tmp_path / "plain", text.ids, None)
    (tmp_path / "expected.json").write_text(json.dumps(content | found.as_json()))
    return tmp_path / "expected.json"


def flags(tmp_path: Path, **changes: Any) -> list[object]:
    protocol = {"new_tokens": NEW_TOKENS, "repeats": 1, "processes": 1, "decode": "captured"}
    protocol |= {"prompt_tokens": [], "batch_sizes": [1]} | changes
    return ["--latency", json.dumps(protocol), "--prompts", tmp_path / "prompts.json"]


def latency(
    harness: Callable, tmp_path: Path, does: dict[str, Any], *options: object, **changes: Any
) -> dict[str, Any]:
    result = harness("latency.measure", "out.json", does, *flags(tmp_path, processes=2, **changes), *options)
    assert result.returncode == 0, result.stderr
    return json.loads((tmp_path / "out.json").read_text())


def test_a_refused_way_to_decode_keeps_the_row(harness: Callable, tmp_path: Path) -> None:
    found = latency(harness, tmp_path, {"other_way": "its step waits for the host"})
    assert found["mode"] == "fake"
    assert len({run["process"] for run in found["runs"]}) == 2
    assert found["other_modes"] == [{"mode": "other", "refused": "its step waits for the host"}]
    plain = latency(harness, tmp_path, {"other_way": "its step waits for the host"}, decode="generate")
    assert (plain["mode"], plain["other_modes"]) == ("fake", [])


def test_an_engine_that_cannot_decode_is_a_row_without_speed(harness: Callable, tmp_path: Path) -> None:
    found = latency(harness, tmp_path, {"no_decoding": "its weights are read anew for each token"})
    assert (found["summary"], found["reason"]) == (None, "its weights are read anew for each token")
    assert found["protocol"]["new_tokens"] == NEW_TOKENS


@pytest.mark.timing
def test_threads_are_those_that_the_engine_is_told(
    harness: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snakemake exports its own number, which CTranslate2's MKL would take instead."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert latency(harness, tmp_path, {})["versions"]["OMP_NUM_THREADS"] == "unset"


@pytest.mark.timing
def test_the_result_holds_what_the_engine_keeps(harness: Callable, tmp_path: Path) -> None:
    held = footprint.read(latency(harness, tmp_path, {})["footprint"])
    assert held == Footprint(40 * 40 * 8, Cache([Layers(2, 3.0)], page=4))


@pytest.mark.timing
def test_known_delays_come_out_within_one_percent(harness: Callable, tmp_path: Path) -> None:
    more = {"prompt_tokens": [80, 111], "batch_sizes": [4]}
    seconds = (30 + 60) * PREFILL + 2 * (NEW_TOKENS - 1) * STEP
    together = 60 * PREFILL + (NEW_TOKENS - 1) * STEP
    for _ in range(5):  # a stall of this machine is no fault of the harness, whether it saw it or not
        found = latency(harness, tmp_path, {"prefill": PREFILL, "step": STEP}, **more)
        summary, (longer, beyond), (four,) = found["summary"], found["lengths"], found["batches"]
        figures = {
            "tpot": (summary["tpot_ms_p50"], STEP * 1000),
            "gap": (summary["itl_ms_p50"], STEP * 1000),
            # prompts of 30 and 60 tokens, as often: the median lies between
            "ttft": (summary["ttft_ms_p50"], 45 * PREFILL * 1000),
            "tokens/s": (summary["tokens_per_second"], 2 * NEW_TOKENS / seconds),
            "ttft of 80": (longer["ttft_ms_p50"], 80 * PREFILL * 1000),
            "tpot of 80": (longer["tpot_ms_p50"], STEP * 1000),
            "prefill": (longer["prefill_tokens_per_second"], 1 / PREFILL),
            "tokens/s of four": (four["tokens_per_second"], 4 * NEW_TOKENS / together),
        }
        off = {name: pair for name, pair in figures.items() if pair[0] != pytest.approx(pair[1], rel=WITHIN)}
        if not off:
            break
    assert off == {}
    rate = found["weight_bytes_per_token"] * summary["tokens_per_second"] / found["copy_bandwidth_bytes_per_second"]
    assert summary["bandwidth_fraction"] == pytest.approx(rate)
    assert len(longer["runs"]) == 2
    assert beyond["skipped"] == "with 10 new tokens it exceeds the model's context of 120"
    assert all(len(run["token_seconds"]) == NEW_TOKENS for run in found["runs"] + four["runs"])


@pytest.mark.timing
def test_a_busy_host_marks_the_row(harness: Callable, tmp_path: Path) -> None:
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(max(2, os.cpu_count() // 8))
    ]
    try:
        found = latency(harness, tmp_path, {"step": 0.01})
    finally:
        for each in spinning:
            each.kill()
            each.wait()
    reasons = [each for each in found["interference"] if not each.startswith("not steady")]  # what takes it may vary
    assert len(reasons) == 2
    assert all("other programs took" in reason for reason in reasons)
    assert reasons[1].endswith("(process 1)")


ADDED = "it adds a token (a beginning of sequence?) before those that it is given"
DECODED = "it adds a token (a beginning of sequence?) before the prompt when it decodes"
ROW = "it adds a token of its own (a beginning of sequence?)"
LATE = "its logits are shifted by one: a token's row holds what follows the token"
SHIFTED = "its log-probabilities are shifted by one, towards the token"
FAULTS = {"bos": ADDED, "bos-in-logits": ADDED, "bos-row": f"returned logits of 5 positions for 4 tokens: {ROW}"}
FAULTS |= {"bos-shifts": f"{ADDED}, and returns that one's row too", "bos-in-decoding": DECODED}
FAULTS |= {"late": f"{LATE} before it", "early": f"{LATE} after it"}


@pytest.mark.parametrize("fault", ["bos-in-decoding", "bos-row", "late", "early", "random-tokens"])
def test_tokens_after_another_prompt_are_refused(tmp_path: Path, fault: str) -> None:
    message = {"random-tokens": "it decodes after something else", "bos-row": ROW}.get(fault) or FAULTS[fault]
    with pytest.raises(UserError, match=re.escape(message)):
        alignment.check_chosen(make_engine(tmp_path, fault=fault), [IDS[30:60], IDS[60:120]], fake.BOS)


@pytest.mark.parametrize("fault", ["fewer", "bos-in-decoding"])
def test_latency_refuses_an_engine_in_one_line(harness: Callable, tmp_path: Path, fault: str) -> None:
    result = harness("latency.measure", "out.json", {"fault": fault}, *flags(tmp_path))
    message = FAULTS.get(fault, "the engine returned 9 tokens where 10 were asked for")
    assert message in (line_of_refusal(result, tmp_path / "out.json") or "")


@pytest.mark.parametrize(
    ("does", "message"),
    [
        *(({"fault": fault}, message) for fault, message in FAULTS.items()),
        ({"fault": "bos", "tells": ["target_logprobs"]}, ADDED),
        ({"fault": "late", "tells": ["target_logprobs"]}, f"{SHIFTED} before"),
        ({"fault": "early", "tells": ["target_logprobs"]}, f"{SHIFTED} after"),
    ],
)
def test_predictions_of_another_text_are_refused(
    harness: Callable, tmp_path: Path, does: dict[str, Any], message: str
) -> None:
    engine = make_engine(tmp_path / "faulty", noise=0.5, **does)
    with pytest.raises(UserError, match=re.escape(message)):
        alignment.examine(engine, tmp_path / "faulty", IDS, expect(tmp_path))


@pytest.mark.parametrize("program", ["gate.check", "quality.measure"])
def test_scoring_names_a_fault_in_one_line(harness: Callable, tmp_path: Path, program: str) -> None:
    options = ["--reference", expect(tmp_path)]
    if program == "quality.measure":
        assert harness("quality.measure", "own.json", {}, "--write-reference", tmp_path / "kept").returncode == 0
        options = ["--reference", tmp_path / "kept", "--expected", tmp_path / "expected.json"]
    result = harness(program, "out.json", {"fault": "bos", "noise": 0.5}, *options)
    assert ADDED in (line_of_refusal(result, tmp_path / "out.json") or "")


@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
def test_an_engine_that_is_only_imprecise_passes(harness: Callable, tmp_path: Path, noise: float) -> None:
    gate, plain = expect(tmp_path), tmp_path / "plain"
    assert alignment.examine(make_engine(plain, noise=noise), plain, IDS, gate) == {}


@pytest.mark.parametrize("noise", [0.0, 0.01, 1.0])
def test_the_gate_wants_the_weights_own_predictions(harness: Callable, tmp_path: Path, noise: float) -> None:
    options = ["--reference", expect(tmp_path)]
    result = harness("gate.check", "out.json", {"noise": noise}, *options)
    assert result.returncode == int(noise > 0)
    if noise:
        assert "the engine does not calculate what the weights say" in result.stderr.splitlines()[-1]
        assert harness("gate.check", "out.json", {"noise": noise}, *options, "--unchecked", "why").returncode == 0


TARGETS = {"tells": ["target_logprobs"]}


def measure_quality(harness: Callable, tmp_path: Path, does: dict[str, Any], out: str) -> dict[str, Any]:
    options = ["--reference", tmp_path / "kept", "--expected", tmp_path / "expected.json"]
    result = harness("quality.measure", out, does, *options)
    assert result.returncode == 0, result.stderr
    return json.loads((tmp_path / out).read_text())


def test_missing_probabilities_are_empty_with_a_reason(harness: Callable, tmp_path: Path) -> None:
    expect(tmp_path)
    assert harness("quality.measure", "own.json", {}, "--write-reference", tmp_path / "kept").returncode == 0
    whole = measure_quality(harness, tmp_path, {"noise": 0.5}, "whole.json")
    found = measure_quality(harness, tmp_path, {"noise": 0.5} | TARGETS, "targets.json")
    assert found["no_divergence"] == "its engine returns no logits"
    assert "no_divergence" not in whole
    assert found["summary"].keys() == whole["summary"].keys() | {"kld_lower_bound"}
    assert found["summary"]["kld_lower_bound"] is None  # this engine tells the targets' alone
    for name, value in whole["summary"].items():
        expected = pytest.approx(value) if name.startswith(("perplexity", "delta_p")) else None
        assert found["summary"][name] == expected, name
    assert found["windows"]["nll"] == pytest.approx(whole["windows"]["nll"])  # what the paired ratio is made of
    with np.load(tmp_path / "targets.npz") as positions:
        assert positions.files == ["nll", "delta_p"]
    nothing = measure_quality(harness, tmp_path, {"tells": []}, "nothing.json")
    assert (nothing["summary"], nothing["reason"]) == (None, "its engine returns no probabilities of a given text")
    with np.load(tmp_path / "nothing.npz") as positions:  # the workflow's rule has it among its outputs
        assert positions.files == []
    result = harness("quality.measure", "none.json", TARGETS, "--write-reference", tmp_path / "none")
    assert result.stderr.splitlines()[-1].startswith("error: engine fake returns no logits")
    timed = latency(harness, tmp_path, {"tells": []})
    assert timed["unchecked"] == "its engine returns neither logits nor its likeliest tokens"
    assert (timed["options"], timed["gpus"]) == ({}, 1)


LIKELIEST = TARGETS | {"top": 5}


def test_tokens_are_compared_with_reported_likeliest_ones(harness: Callable, tmp_path: Path) -> None:
    assert "unchecked" not in latency(harness, tmp_path, LIKELIEST)
    result = harness("latency.measure", "wrong.json", LIKELIEST | {"fault": "random-tokens"}, *flags(tmp_path))
    said = line_of_refusal(result, tmp_path / "wrong.json") or ""
    assert "the tokens that the engine decodes are not the likeliest of those" in said


def test_the_gate_uses_what_an_engine_reports(harness: Callable, tmp_path: Path) -> None:
    options = ["--reference", expect(tmp_path)]
    perplexities = []
    for does in ({}, TARGETS, {"tells": []}):
        assert harness("gate.check", "out.json", does, *options).returncode == 0
        found = json.loads((tmp_path / "out.json").read_text())
        perplexities.append(found["perplexity"])
        assert ("unchecked" in found["faithful"]) == bool(does)
    assert perplexities == [pytest.approx(found["reference"]), pytest.approx(found["reference"]), None]


def test_options_and_gpus_are_recorded_or_refused(harness: Callable, tmp_path: Path) -> None:
    found = latency(harness, tmp_path, {}, "--options", '{"step": 0.02}')
    assert found["options"] == {"step": 0.02}
    assert found["summary"]["tpot_ms_p50"] > 19  # the processes that measured were told, too
    options = ["--reference", expect(tmp_path)]
    for more, message in (
        (("--options", '{"stop": 1.0}'), "error: engine fake: unknown option 'stop'; did you mean 'step'?"),
        (("--options", '{"step": "x"}'), "error: engine fake: option step is 'x'; it must be of type float"),
        (("--gpus", 2), "error: device cpu has no GPUs, but gpus is 2; remove gpus, or set device: cuda"),
    ):
        result = harness("gate.check", "out.json", {}, *options, *more)
        assert (result.returncode, result.stderr.splitlines()[-1]) == (1, message)


def test_a_gate_compares_by_the_reference_s_protocol(harness: Callable, tmp_path: Path) -> None:
    options = ("--reference", expect(tmp_path, "hf-strided"))
    assert harness("gate.check", "out.json", {}, "--protocol", "hf-strided", *options).returncode == 0
    result = harness("gate.check", "out.json", {}, *options)
    assert result.returncode == 1
    said = f"error: {tmp_path / 'expected.json'}: was made by hf-strided, not by gptq-2048, or is old; delete it"
    assert result.stderr.splitlines()[-1] == said
