"""A server as an engine: options, ids, two at once, and what a killed client leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from fake_model import EOS, VOCAB, Model

sys.path.append(str(REPO / "tests/helpers/harness/engines"))
from fake_serve import Engine

from quantmill.client import stream
from quantmill.common.program import UserError
from quantmill.devices import cpu, processes

PROMPT = [5, 9, 13, 40]
TIMES = (0.02, 0.0, 0.01, 0.0)  # a, b, c, d of the fake server


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    folder = tmp_path / "model/fake"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": EOS}))
    return folder


def test_a_server_is_an_engine(artifact: Path) -> None:
    before = cpu.processors()
    engine = Engine(artifact, "cpu", 64, times=TIMES)
    (mine,) = os.sched_getaffinity(0)  # the last one, but where another client has that
    (server,) = engine.processes()
    theirs = os.sched_getaffinity(server)
    assert theirs <= before and (mine not in theirs or len(before) == 1)
    assert engine.threads == len(theirs)
    start = time.perf_counter()
    came = list(engine.decode([PROMPT, PROMPT[::-1]], 6))
    for number, prompt in enumerate((PROMPT, PROMPT[::-1])):
        assert [token for place, token, _ in came if place == number] == Model().decode(prompt, 6)
    assert start < engine.sent < came[0][2] < came[-1][2] < time.perf_counter()
    assert came[-1][2] - engine.sent > 0.02 + 5 * 0.01  # the server's own times
    assert artifact.name in engine.arguments or "--port PORT" in engine.arguments
    engine.close()
    assert processes.began(server) is None
    assert cpu.processors() == before
    assert not (artifact.parent / ".servers").exists()


@pytest.mark.parametrize("option", ["port", "por", "mod", "model"])
def test_an_option_of_ours_is_refused_also_shortened(artifact: Path, option: str) -> None:
    with pytest.raises(UserError, match=rf"^engine fake-serve: option '{option}' is set by Quantmill; remove"):
        Engine(artifact, "cpu", 1, **{option: 1})


def test_two_equal_servers_run_at_once(artifact: Path) -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path; import fake_serve\n"
        "engine = fake_serve.Engine(Path(sys.argv[3]), 'cpu', 1)\n"
        "print(len(list(engine.decode([[5, 9]], 3))), flush=True); input(); engine.close()"
    )
    places = [REPO / "scripts", REPO / "tests/helpers/harness/engines", artifact]
    command = [sys.executable, "-c", script, *map(str, places)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    assert [each.stdout.readline() for each in both] == ["3\n", "3\n"]
    assert len(list((artifact.parent / ".servers").glob("*.json"))) == 2
    for each in both:
        each.communicate("\n")
    assert [each.returncode for each in both] == [0, 0]
    assert not (artifact.parent / ".servers").exists()


def test_a_killed_clients_server_is_removed(artifact: Path) -> None:
    script = (
        "import os, sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path; import fake_serve\n"
        "engine = fake_serve.Engine(Path(sys.argv[3]), 'cpu', 1)\n"
        "print(*engine.processes(), flush=True); os.kill(os.getpid(), 9)"
    )
    places = [REPO / "scripts", REPO / "tests/helpers/harness/engines", artifact]
    result = subprocess.run([sys.executable, "-c", script, *places], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL
    (left,) = map(int, result.stdout.split())
    engine = Engine(artifact, "cpu", 1)
    assert processes.began(left) is None
    assert len(list((artifact.parent / ".servers").glob("*.json"))) == 1
    engine.close()


def test_ids_that_a_stream_withholds_are_asked_for(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(artifact, "cpu", 1)
    read = engine.read

    def withhold(recording: Any) -> list[stream.Reply]:
        replies = read(recording)
        for reply in replies:
            reply.events[1] = reply.events[1]._replace(ids=())
            reply.oddities["withheld"] = 1
        return replies

    monkeypatch.setattr(engine, "read", withhold)
    assert [token for _, token, _ in engine.decode([PROMPT], 5)] == Model().decode(PROMPT, 5)
    engine.close()


def test_a_server_that_died_is_named(artifact: Path) -> None:
    engine = Engine(artifact, "cpu", 1)
    (server,) = engine.processes()
    os.kill(server, signal.SIGKILL)
    with pytest.raises(UserError, match=r"fake@fake-serve: the server ended \(killed by signal 9\)"):
        list(engine.decode([PROMPT], 5))
    engine.close()


def test_a_server_without_ids_is_refused(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(artifact, "cpu", 1)
    monkeypatch.setattr(engine, "dialect", "extended")  # which does not ask for ids
    with pytest.raises(UserError, match="its server does not return the ids of its tokens"):
        list(engine.decode([PROMPT], 5))
    engine.close()
