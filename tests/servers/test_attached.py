"""Servers that somebody else runs: each replayed from its transcript, and what is wrong named in one line."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attached_servers import Changed, Told, posts, read
from conftest import REPO, interpreter
from transcript import Exchange, Replay, listen

from quantmill.client.dialects import DIALECTS
from quantmill.engines.served.attached_servers import SERVERS

TRANSCRIPTS = sorted((REPO / "tests/servers/transcripts").glob("*.json"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_what_went_over_the_wire_is_understood(path: Path, attach: Callable[..., Told]) -> None:
    transcript = read(path.stem)
    replay = Replay(transcript["exchanges"])
    with listen(replay) as url:
        result = attach(transcript["engine"], url, **transcript["options"])
    assert replay.wrong == ""
    assert replay.left == []
    if "error" in transcript["told"]:
        assert result.returncode == 1
        assert result.stderr == f"error: {url} (fp16): {transcript['told']['error']}\n"
    else:
        told = json.loads(result.stdout)
        assert told.pop("processes") == [os.getpid()]  # the server's, which is replayed here
        assert told == transcript["told"], result.stderr
        assert result.returncode == 0


def test_attached_servers_have_transcripts_and_documentation() -> None:
    page = (REPO / "docs/SERVING.md").read_text()
    known = {read(path.stem)["engine"]: path.stem for path in TRANSCRIPTS}
    assert set(known) == set(SERVERS)
    for name, server in SERVERS.items():
        rows = [line.replace("`", "") for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(rows) == (1 if name == "openai" else 2)  # how it is spoken to, and the command that starts it
        _, _, option = server.cache_off.partition("start it with ")
        assert option in rows[-1]
        assert server.dialect in DIALECTS
    for path in TRANSCRIPTS:
        transcript = read(path.stem)
        assert transcript["origin"] in ("recorded", "written")
        row = next(line for line in page.splitlines() if line.startswith(f"| `{transcript['engine']}` |"))
        assert transcript["origin"] in row


@pytest.mark.parametrize("status", [400, 422, 503])
def test_a_refusal_to_score_leaves_quality_empty(status: int, attach: Callable[..., Told]) -> None:
    exchanges = read("openai-vllm")["exchanges"]
    for each in exchanges:
        if "prompt_logprobs" in (each["body"] or {}):
            each |= {"status": status, "chunks": ['{"error": {"message": "at most 5 are allowed"}}']}
    with listen(Changed(exchanges, lambda each: each)) as url:
        result = attach("openai", url)
    said = f"(/v1/completions was answered with status {status} (at most 5 are allowed))"
    if status == 503:
        assert result.returncode == 1
        assert result.stderr == f"error: {url} (fp16): its server does not answer {said}\n"
    else:
        assert result.returncode == 0
        assert "likelihood" not in json.loads(result.stdout)
        assert result.stderr == f"no quality: {url} (fp16): its server does not answer {said}\n"


FAULTS: dict[str, tuple[str, Callable[[Exchange], Exchange], dict[str, str], str]] = {
    "another model's name": ("sglang", lambda each: each, {"model": "mine"}, ": it serves demo, not mine; correct the"),
    "several models": (
        "sglang",
        lambda each: each | {"chunks": ['{"data": [{"id": "a"}, {"id": "b"}]}']} if "models" in each["path"] else each,
        {},
        ": it serves a, b; name one in the option model",
    ),
    "no models": (
        "sglang",
        lambda each: each | {"chunks": ["<html>"]} if "models" in each["path"] else each,
        {},
        ": /v1/models lists no models; is it a server of sglang?",
    ),
    "another tokenizer": (
        "sglang",
        posts(lambda chunk: chunk.replace('"text": " hu', '"text": " ab')),
        {},
        " (fp16): another model is served: its text is not that of its ids by ",
    ),
    "a larger vocabulary": (
        "sglang",
        posts(lambda chunk: chunk.replace("[1121", "[9121")),
        {},
        " (fp16): another model is served: it writes token 9121, and the artifact's vocabulary has 2048",
    ),
    "a token before the prompt": (
        "sglang",
        posts(lambda chunk: chunk.replace('"prompt_tokens": 13', '"prompt_tokens": 14')),
        {},
        " (fp16): it read 14 tokens where 13 were sent: it adds or cuts some, or has another model's tokenizer",
    ),
    "a token before a text": (
        "ollama",
        posts(lambda chunk: chunk.replace('"prompt_eval_count": 13', '"prompt_eval_count": 14')),
        {},
        " (fp16): it read 14 tokens where 13 were sent: it adds or cuts some, or has another model's tokenizer",
    ),
    "a cache": (
        "sglang",
        posts(lambda chunk: chunk.replace('"cached_tokens": 0', '"cached_tokens": 4')),
        {},
        " (fp16): 4 tokens of a prompt came out of its cache; start it with --disable-radix-cache",
    ),
    "an end of sequence": (
        "tgi",
        posts(lambda chunk: chunk.replace('"length"', '"eos_token"')),
        {},
        " (fp16): its server ended with 'eos_token' after 8 tokens where 8 were asked for: it does not ignore the end",
    ),
    "an end of sequence in text": (
        "ollama",
        posts(lambda chunk: chunk.replace('"length"', '"stop"').replace('"eval_count": 8', '"eval_count": 7')),
        {},
        " (fp16): its server ended with 'stop' after 7 tokens where 8 were asked for: it does not ignore the end",
    ),
    "an error": (
        "sglang",
        posts(lambda chunk: 'data: {"error": {"message": "out of memory"}}\n\n'),
        {},
        " (fp16): its server does not answer (out of memory)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_server_is_one_line(fault: str, attach: Callable[..., Told]) -> None:
    name, change, options, message = FAULTS[fault]
    with listen(Changed(read(name)["exchanges"], change)) as url:
        result = attach(name, url, **options)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {url}{message}")
    assert result.stderr.count("\n") == 1


def test_a_server_that_is_not_there_is_one_line(attach: Callable[..., Told]) -> None:
    with listen(Replay([])) as url:
        pass
    result = attach("tgi", url)
    assert result.stderr == f"error: {url}: no answer (connection refused); start the server, or correct its url\n"


@pytest.fixture
def locked() -> Iterator[tuple[str, Replay]]:
    """SGLang's transcript behind a token, and the requests' headers."""
    replay = Replay(read("sglang")["exchanges"])

    def answer(method: str, path: str, body: Any, headers: dict[str, str]) -> Exchange:
        if headers.get("Authorization") != "Bearer sk-secret":
            return {"status": 401, "type": "text/plain", "chunks": [f"wrong key {headers.get('Authorization')}"]}
        return replay(method, path, body, headers)

    with listen(answer) as url:
        yield url, replay


def test_a_token_is_sent_and_shown_nowhere(locked: tuple[str, Replay], attach: Callable[..., Told]) -> None:
    url, replay = locked
    result = attach("sglang", url, {"MY_TOKEN": "sk-secret"}, token_variable="MY_TOKEN")
    told = json.loads(result.stdout)
    assert {name: told[name] for name in read("sglang")["told"]} == read("sglang")["told"]
    assert replay.left == []
    assert "sk-" not in result.stdout + result.stderr + " ".join(map(str, result.args))


@pytest.mark.parametrize(
    ("environment", "variable", "message"),
    [
        ({}, {}, "status 401; name the environment variable of its token in the option token_variable"),
        ({}, {"token_variable": "MY_TOKEN"}, "MY_TOKEN is not set; set it to the token"),
        ({"MY_TOKEN": "sk-wrong"}, {"token_variable": "MY_TOKEN"}, "status 401; name the environment variable of"),
    ],
)
def test_a_wrong_token_is_not_shown(
    locked: tuple[str, Replay],
    attach: Callable[..., Told],
    environment: dict[str, str],
    variable: dict[str, str],
    message: str,
) -> None:
    result = attach("sglang", locked[0], environment, **variable)
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "sk-" not in result.stdout + result.stderr


def test_texts_of_prompts_keep_their_tokens(call: Callable[..., Told]) -> None:
    program, text = REPO / "tests/servers/texts_facts.py", REPO / "config/evaluation.txt"
    result = call(interpreter("tools"), program, REPO / "demo", text, PYTHONPATH=str(REPO / "scripts"))
    told = json.loads(result.stdout)
    assert told["exact"]
    assert told["begins"] == 0  # none is read otherwise
    assert told["counts"] == told["lengths"]


def test_an_authority_that_is_none_is_one_line(attach: Callable[..., Told], tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    for file, reason in (("no.pem", "it holds no certificate"), ("none.pem", "no such file or directory")):
        result = attach("tgi", "https://127.0.0.1:1", authority=str(tmp_path / file))
        words = f"{tmp_path / file}: {reason}; name a file of certificates in PEM"
        assert result.stderr == f"error: option authority: {words}\n"


@pytest.mark.slow
def test_transformers_serve_writes_what_transformers_does(demo: Path, call: Callable[..., Told]) -> None:
    program, fp16 = REPO / "tests/servers/served_text.py", demo / "artifacts/demo/fp16"
    engines = (("transformers-serve", "transformers-serve"), ("torch", "transformers"))
    told = [
        call(interpreter(env), program, engine, fp16, PYTHONPATH=str(REPO / "scripts")).stdout.splitlines()[-1]
        for env, engine in engines
    ]
    assert told[0] == told[1]
    assert not (fp16.parent / ".servers").exists()


def test_transformers_server_may_read_prompts_otherwise(
    tmp_path: Path, torch_python: Path, call: Callable[..., Told]
) -> None:
    """Of two folders that differ in `tokenizer_class`, it would read one in another way."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from quantmill.common.program import run\n"
        "from quantmill.engines.transformers_serve import Engine\n"
        "def main():\n"
        "    engine = Engine.__new__(Engine)\n"
        "    engine.command(Path(sys.argv[1]), 'cpu', 1, 1, {})\n"
        "    print(engine.prompt(engine.texts.encode('The first line, and more.')))\n"
        "run(main)\n"
    )
    told = {}
    for kind in ("PreTrainedTokenizerFast", "LlamaTokenizerFast"):
        folder = tmp_path / kind
        folder.mkdir()
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(REPO / "demo" / name, folder)
        words = json.loads((REPO / "demo/tokenizer_config.json").read_text()) | {"tokenizer_class": kind}
        (folder / "tokenizer_config.json").write_text(json.dumps(words))
        told[kind] = call(torch_python, "-c", program, folder, PYTHONPATH=str(REPO / "scripts"))
    assert told["PreTrainedTokenizerFast"].stdout == "The first line, and more.\n"
    refused = told["LlamaTokenizerFast"].stderr.splitlines()[-1]
    assert "transformers' server reads prompts by LlamaTokenizer, as other tokens than this file says" in refused
