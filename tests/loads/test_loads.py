"""Loads through the whole program, with the fake server in place of a real one: what is sent, found and refused."""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import REPO
from fake_model import EOS, VOCAB, Model
from load_study import BURST, EVALUATION, SERVING, TIMES, A, B, C, D
from program_fixtures import Program, Result

from quantmill.client.checks import Finding
from quantmill.common import manifest
from quantmill.devices import processes
from quantmill.loads import result
from quantmill.loads.plan import PER_SLOT
from quantmill.metrics.goodput import Goodput
from quantmill.metrics.serving import Reads
from quantmill.report import loads, results
from quantmill.report.load_columns import LOAD_COLUMNS, bytes_read

ALONE = [sys.executable, str(REPO / "tests/helpers/harness/run.py")]  # starts a program in a process of its own
DISTURBED = {"slow_reader", "schedule_lag", "stall"}  # what a busy machine does to a client, which is refused


def program(folder: Path, options: dict[str, Any], serving: dict[str, Any]) -> list[str]:
    """Return loads.measure with its arguments for the folder's fake artifact; the server's faults are options."""
    command: list[object] = [
        "loads.measure",
        folder / "model/fake",
        folder / "out.json",
        "--engine",
        "fake-serve",
        "--device",
        "cpu",
    ]
    command += ["--options", json.dumps({"times": TIMES} | options), "--loads", json.dumps(SERVING | serving)]
    command += ["--evaluation", folder / "evaluation.json", "--burst", folder / "burst.json"]
    return list(map(str, command))


def prepare(folder: Path, config: dict[str, Any] | None = None) -> None:
    """Make a fake artifact, with more in its config.json, and its texts."""
    artifact = folder / "model/fake"
    artifact.mkdir(parents=True)
    (artifact / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": EOS} | (config or {})))
    manifest.write(artifact, format="fake", tool="fake", tool_version="1")
    EVALUATION.write(folder / "evaluation.json")
    (folder / "burst.json").write_text(json.dumps({"prompts": [{"text": "", "ids": ids} for ids in BURST]}))


@pytest.fixture
def load(tmp_path: Path, run_harness: Program) -> Callable[..., Result]:
    """Return a function that runs loads.measure on a fake artifact."""
    prepare(tmp_path)
    return lambda options, **serving: run_harness(*program(tmp_path, options, serving))


def weights_of_8_bits(rounds: bool) -> dict[str, Any]:
    """Return the config.json of a format, which may round activations; then it is of a mixture, too."""
    groups = {"group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8} if rounds else None}}
    text = {"num_experts": 8 if rounds else 1}
    return {"quantization_config": {"config_groups": groups}, "text_config": text}


MEASURED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # config, options, loads
    "sound": ({}, {}, {"concurrency": [2], "prompt_tokens": [10, 20], "new_tokens": 6}),
    "rounded": (weights_of_8_bits(True), {"fault": "batch"}, {"concurrency": [3], "new_tokens": 6}),
    "unrounded": (weights_of_8_bits(False), {"fault": "batch"}, {"concurrency": [3], "new_tokens": 6}),
    "short": ({}, {"fault": "short"}, {"burst": 4, "concurrency": [2], "new_tokens": 6}),
    "other_model": ({}, {"fault": "other_model"}, {"concurrency": [2], "new_tokens": 6}),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure servers whose times no test is about: all at once, because they mostly wait."""
    root, started = tmp_path_factory.mktemp("measured"), []
    for name, (config, options, serving) in MEASURED.items():
        prepare(root / name, config)
        command = [*ALONE, *program(root / name, options, serving)]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    said = [each.communicate()[1] for each in started]
    assert [each.returncode for each in started] == [0] * len(MEASURED), said
    return root


@pytest.fixture
def copy_of_measured(request: pytest.FixtureRequest, measured: Path, tmp_path: Path) -> Path:
    """Copy the measurement of a sound server, or of the one that the test names, to change it."""
    return shutil.copytree(measured / getattr(request, "param", "sound"), tmp_path, dirs_exist_ok=True)


def read(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out.json").read_text())


@pytest.mark.long
def test_a_server_is_put_under_every_load(load: Callable, tmp_path: Path) -> None:
    result = load({}, burst=6, concurrency=[3], rates=[30.0], requests=20, restarts=2)
    assert result.returncode == 0, result.stderr
    found = read(tmp_path)
    assert [each["load"] for each in found["loads"]] == ["burst-6", "concurrency-3", "rate-30"]
    burst, three, _ = found["loads"]
    assert burst["figures"]["requests"] == 12
    assert three["figures"]["requests"] == 2 * 3 * PER_SLOT
    assert len(found["summary"]["startup_s"]) == 2
    assert found["summary"]["nll_shift"] == 0  # of a table, whose predictions depend on nothing else
    for each in found["loads"]:
        assert each["figures"]["failed"] == each["figures"]["rejected"] == each["figures"]["unfinished"] == 0
        assert each["figures"]["tokens_equal_solo"] == 1.0
        assert each["figures"]["cached_token_fraction"] == 0
        assert {one["fault"] for one in each["findings"] if one["refuses"]} <= DISTURBED
    generated = [sum(counted["generated_tokens"] for counted in each["counters"]) for each in found["loads"]]
    assert generated[0] == 12 * 12
    with np.load(tmp_path / "out.npz") as raw:
        assert raw["burst-6/0/events"].tolist() == [12] * 6
        assert len(raw["concurrency-3/1/times"]) == raw["concurrency-3/1/tokens"].sum() == generated[1] / 2
    assert not (tmp_path / "model/.servers").exists()
    assert not (tmp_path / ".out.json.work").exists()


@pytest.mark.parametrize("name", ["unrounded", "rounded"])
def test_rounded_activations_are_judged_by_the_mean(measured: Path, name: str) -> None:
    rounds, found = name == "rounded", read(measured / name)
    assert found["mixture"] is rounds
    (three,) = found["loads"]
    about = {each["fault"]: each["refuses"] for each in three["findings"] if "nats behind" in each["message"]}
    assert about == ({"tokens_moved": False} if rounds else {"batch_dependent": True})


@pytest.mark.timing
def test_figures_are_the_servers_own(load: Callable, tmp_path: Path) -> None:
    tpot, ttft = 1000 * (C + 3 * D), 1000 * (A + 32 * B)
    for _ in range(4):  # a stall of this machine is no fault of the client, whether it saw it or not
        assert load({}, concurrency=[3], new_tokens=24).returncode == 0
        (three,) = read(tmp_path)["loads"]
        assert {each["fault"] for each in three["findings"]} <= DISTURBED | {"unstable"}
        found = (three["figures"]["tpot_ms_p50"], three["figures"]["ttft_ms_p50"])
        right = (pytest.approx(tpot, rel=0.02), pytest.approx(ttft, rel=0.1))
        if found == right:
            break
    assert found == right


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "named"), [("bos", "token_added"), ("prefix_cache_told", "cached"), ("serial", "serial")]
)
def test_a_servers_fault_refuses_the_figures(load: Callable, tmp_path: Path, fault: str, named: str) -> None:
    result = load({"fault": fault}, concurrency=[3])
    assert result.returncode == 0, result.stderr
    (three,) = read(tmp_path)["loads"]
    assert named in {each["fault"] for each in three["findings"] if each["refuses"]}


@pytest.mark.slow
def test_the_goodput_is_searched_for(load: Callable, tmp_path: Path) -> None:
    # one slot that takes 1 + 11 x 3 ms a request: 29 a second at most
    times, limits = (0.001, 0.0, 0.003, 0.0), {"ttft_ms": 200, "tpot_ms": 50}
    result = load({"slots": 1, "times": times}, goodput=True, concurrency=[1], requests=40, limits=limits)
    assert result.returncode == 0, result.stderr
    found = read(tmp_path)["goodput"]
    assert 1 < found["rate"] < 35  # forty arrivals are few
    assert found["above"] <= found["rate"] * 1.06
    assert all(met <= arrived == 40 for _, met, arrived, _, _ in (each.values() for each in found["trials"]))


def test_interference_of_the_goodput_search_is_reported(copy_of_measured: Path) -> None:
    busy, noisy = "other programs took 62% of the processors' time", "the card was 20 degrees hotter"
    loaded = [SimpleNamespace(findings=[], interference=each) for each in ([busy], [], [noisy, busy])]
    start = SimpleNamespace(goodput=Goodput(2.0, 2.1, None, None, []), findings=[], loads=[], searched=loaded)
    (copy_of_measured / "out.json").write_text(json.dumps(read(copy_of_measured) | {"goodput": result.goodput(start)}))
    assert collect(copy_of_measured)[-1]["interference"] == [busy, noisy]


def test_token_faults_refuse_the_goodput() -> None:
    """The search compares no tokens."""

    def load_with(*faults: str) -> SimpleNamespace:
        return SimpleNamespace(findings=[Finding(fault, "") for fault in faults], interference=[])

    start = SimpleNamespace(
        goodput=Goodput(2.0, 2.1, None, None, []),
        findings=[Finding("sampling", ""), Finding("noted", "", refuses=False)],
        loads=[load_with("batch_dependent", "stall"), load_with("unlike_predictions")],
        searched=[load_with("rejected", "serial")],
    )
    found = {each["fault"] for each in result.goodput(start)["findings"]}
    assert found == {"sampling", "batch_dependent", "unlike_predictions", "serial"}


def test_a_small_context_is_refused_before_loads(load: Callable, tmp_path: Path) -> None:
    result = load({"context": 100}, concurrency=[3])
    assert result.returncode == 1
    assert "concurrency-3 have some" in result.stderr.splitlines()[-1]
    assert "start 1: concurrency-3" not in result.stderr
    assert not (tmp_path / "out.json").exists()


def test_a_dying_server_is_one_line(load: Callable, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLER, str(tmp_path / "model/.servers")]
    with subprocess.Popen(command) as killer:
        result = load({"times": (0.01, 0.0001, 0.05, 0.001)}, concurrency=[3], new_tokens=60)
        killer.wait()
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: fake@fake-serve: the server ended (killed by signal 9)")
    assert not (tmp_path / "out.json").exists()
    assert not (tmp_path / "out.npz").exists()


KILLER = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
while True:
    for record in folder.glob("*.json"):
        pids = sorted(map(int, json.loads(record.read_text())))
        if len(pids) > 1:  # the supervisor and the server
            time.sleep(1.5)
            os.kill(pids[-1], signal.SIGKILL)
            sys.exit()
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_a_killed_program_leaves_no_server(tmp_path: Path) -> None:
    script = "import signal, os, sys, time; time.sleep(4); os.kill(int(sys.argv[1]), signal.SIGKILL)"
    command = [*ALONE, *program(tmp_path, {"times": (0.01, 0, 0.2, 0)}, {"concurrency": [2]})]
    prepare(tmp_path)
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as killed:
        records = tmp_path / "model/.servers"
        deadline = time.monotonic() + 60
        while not (found := [pid for each in records.glob("*.json") for pid in json.loads(each.read_text())][1:]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        subprocess.run([sys.executable, "-c", script, str(killed.pid)], check=True)
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while any(processes.began(int(pid)) is not None for pid in found):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not (tmp_path / "out.json").exists()


def collect(tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    """Rows of the report, of what loads.measure wrote."""
    found = read(tmp_path)
    config = {"loads": found["protocol"]["loads"], "seed": 0}
    cell = {"model": "m", "format": "fake", "run": "server", "engine": "fake-serve", "options": found["options"]}
    cell |= {"gpus": 1, "artifact": str(tmp_path / "model/fake"), "loads": str(tmp_path / "out.json")}
    cell |= {"logs": {"loads": [str(tmp_path / "log")], "artifact": [str(tmp_path / "log")]}} | changes
    alone = {name: cell[name] for name in ("model", "format", "run")}
    alone |= {"bandwidth_fraction": 0.5, "device_bandwidth": {"bytes_per_second": 1e9}}
    return loads.collect({"config": config, "cells": [cell]}, [alone])


def test_a_step_reads_weights_once_and_each_cache(copy_of_measured: Path) -> None:
    """The fake server does not describe its cache, whose size is unknown until the test sets it."""
    (row,) = collect(copy_of_measured)
    assert row["bandwidth_fraction"] is None
    out = copy_of_measured / "out.json"
    for bytes_a_token, most in ((1e6, "weights"), (3e6, "cache")):
        found = read(copy_of_measured) | {"kv_bytes_per_token": bytes_a_token}
        found["artifact"]["weight_bytes_per_token"] = int(5e7)
        found["loads"][0]["findings"] = []  # of a machine that does other things meanwhile
        out.write_text(json.dumps(found))
        (row,) = collect(copy_of_measured)
        # a step of two users reads 5e7 bytes of weights; each has 15 + 3 tokens
        read_bytes = row["output_tokens_per_second"] * (5e7 / 2 + 18 * bytes_a_token)
        assert row["bandwidth_fraction"] == pytest.approx(read_bytes / 1e9, rel=1e-9)
        assert row["decode_bound_by"] == most


def read_of(slots: int = 4, mixture: bool = False, **figures: float) -> Reads | None:
    """Return the bytes that decoding reads: 100 of weights and 2 a token of the cache, at 60 tokens/s."""
    protocol = {"prompt_tokens": 8, "new_tokens": 4}
    found = {"artifact": {"weight_bytes_per_token": 100}, "kv_bytes_per_token": 2, "mixture": mixture}
    found |= {"protocol": {"loads": protocol}}
    load = {"slots": slots, "figures": {"output_tokens_per_second": 60.0} | figures}
    return bytes_read(found, load, {"bandwidth_fraction": 0.5})


def test_only_drafted_tokens_share_a_step() -> None:
    assert read_of(tokens_per_event=1.5) == read_of(tokens_per_event=1.0) == (60 / 4 * 100, 60 * 10 * 2)
    assert read_of(tokens_per_event=1.5, acceptance=0.5) == (40 / 4 * 100, 40 * 10 * 2)


def test_experts_that_several_users_read_are_unknown(copy_of_measured: Path) -> None:
    assert read_of(1, mixture=True) == read_of(1)
    assert read_of(2, mixture=True) is None
    (copy_of_measured / "out.json").write_text(json.dumps(read(copy_of_measured) | {"mixture": True}))
    why = collect(copy_of_measured)[0]["missing"]["bandwidth_fraction"]
    assert "(of a mixture of experts, one)" in why or why.startswith("refused: ")


@pytest.mark.parametrize("copy_of_measured", ["short"], indirect=True)
def test_rows_hold_the_figures_or_the_reason(copy_of_measured: Path) -> None:
    for each in read(copy_of_measured)["loads"]:
        assert "short" in {finding["fault"] for finding in each["findings"] if finding["refuses"]}
    rows = collect(copy_of_measured)
    assert [(row["load"], row["slots"]) for row in rows] == [("burst-4", None), ("concurrency-2", 2)]
    for row in rows:
        assert "have fewer tokens than were asked for" in row["refused"]
        assert row["output_tokens_per_second"] is None
        assert row["missing"]["ttft_ms_p50"].startswith("refused: ")
        assert row.keys() >= {column.name for column in LOAD_COLUMNS}
    results.write_csv(copy_of_measured / "loads.csv", rows, LOAD_COLUMNS)
    with (copy_of_measured / "loads.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["load"] for row in table] == ["burst-4", "concurrency-2"]
    assert table[0]["requests"] == ""
    assert table[0]["gpus"] == "1"
    (pending,) = collect(copy_of_measured, pending=["loads"])
    assert (pending["load"], pending["missing"]["load"]) == (None, "still to come: the study is running")
    (other,) = collect(copy_of_measured, options={"slots": 3})
    assert other["missing"]["ttft_ms_p50"] == "was measured with another options; run again"
    (copy_of_measured / "log").write_text("error: no memory\n")
    (failed,) = collect(copy_of_measured, loads=str(copy_of_measured / "none.json"))
    assert failed["missing"]["load"] == "failed: no memory"


def test_an_answer_is_the_models_own(measured: Path) -> None:
    """The fake server's table is the reference: with another one every load is refused."""
    assert Model(seed=2).decode(BURST[0], 5) != Model().decode(BURST[0], 5)
    (row,) = collect(measured / "other_model")
    assert "nats behind the likeliest" in row["refused"]
