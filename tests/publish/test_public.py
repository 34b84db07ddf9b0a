"""Nothing of the machine or its user is published, and what is held back is listed."""

import json
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from published_study import TOKEN, Study

# texts of logs, devices and servers, and whether they may be published
SENTENCES = {
    "the device does not report its energy": True,
    "a large loss: its perplexity is 1.57 times fp16's": True,
    "1 of 368 answers have events of several tokens, 1.1 in the mean: gaps are those of events": True,
    "failed: gptq-int4@theirs is not steady": True,
    "llama-cpp-python-0.3.36-832db0699007": True,
    "nat/token": True,
    "2.13.0+cu130": True,
    "PATH=/usr/bin:/home/alice/bin": False,
    "see '/tmp/x y'": False,
    "see /home/alice/my models/x": False,
    "file:///srv/a": False,
    "-I/srv/include": False,
    "~/x": False,
    "~alice/x": False,
    "alice@gpu7:/srv/x": False,
    "//nas/share": False,
    "\\\\nas\\share": False,
    "C:\\Users\\alice": False,
    "$HOME/x": False,
    "%2Fhome%2Falice": False,
    "ws://gpu7": False,
    "HTTP://GPU7.CORP": False,
    "https://huggingface.co/acme/secret": False,
    "gpu7.corp:30000": False,
    "localhost:30000": False,
    "10.0.0.7": False,
    "fe80::1": False,
    "no answer of gpu7": False,
    "no answer of nas.local": False,
    "artifacts/logs/demo/x.log": False,
    "café": False,
    "a\u202eb": False,
}
READ = """
import json, sys
from quantmill.publish.public import Public
shown = Public(frozenset(["fp16", "gptq-int4@theirs"]))
found = shown.value(json.load(sys.stdin))
print(json.dumps([found, shown.withheld]))
"""


def shown(python: Path, found: Any) -> tuple[Any, list[str]]:
    """Return the published part of a value, and what is held back."""
    command = [python, "-c", READ]
    result = subprocess.run(
        command, cwd=REPO / "scripts", input=json.dumps(found), capture_output=True, text=True, check=True
    )
    kept, withheld = json.loads(result.stdout)
    return kept, withheld


def test_nothing_of_the_machine_is_uploaded(study: Study) -> None:
    place = str(study.root)
    study.results["config"] |= {"interpreters": {"torch": f"{place}/bin/python"}, "llama_cpp": f"{place}/build"}
    study.results["config"]["models"]["demo"]["source"] = {"path": f"{place}/weights"}
    study.results["config"]["models"]["demo"]["texts"]["evaluation"] = f"{place}/private.txt"
    study.results["config"]["models"]["other"] = {"source": {"path": f"{place}/other"}}
    options = {
        "url": "https://gpu7.alicesecret.org:8080",
        "token_variable": "ALICESECRET",
        "authority": f"{place}/ca.pem",
    }
    study.results["config"]["runs"] = {"theirs": {"engine": "tgi", "formats": ["gptq-int4"], **options, "options": {}}}
    study.add_row("gptq-int4", run="theirs", engine="tgi", options=options, versions={"arguments": f"serve {place}/a"})
    draft = {"speculative_config": {"model": f"{place}/draft"}}
    row = study.add_row("gptq-int4", run="vllm", engine="vllm", options=draft, versions={"vllm": "0.32.0"})
    row["missing"]["joules_per_token"] = f"failed: {place}/x.log: no such file"
    row["warnings"] = [f"see {place}/x.log"]
    row["missing"]["tokens_per_second"] = "failed: https://gpu7.alicesecret.org:8080: no answer"
    study.results["loads"] = [{"model": "demo", "format": "gptq-int4", "load": None, "refused": f"see {place}/s.log"}]
    task = {"model": "demo", "format": "gptq-int4", "run": None, "task": "arc", "missing": {"flips": f"see {place}/t"}}
    study.results["tasks"] = [task, task | {"model": "other-of-alicesecret"}]
    study.write()
    study.build(
        "gptq-int4", {"model.safetensors": 9}, source={"kind": "path", "path": f"{place}/weights", "sha256": {}}
    )
    more = ("--license", "mit")
    study.published("gptq-int4", more=more, USER="alicesecret", LOGNAME="alicesecret", HOME=place)
    host = re.compile(rf"\b{re.escape(socket.gethostname())}\b".encode())
    assert study.hub.storage.bodies
    for body in [*study.hub.storage.bodies, *study.hub.repositories["models/acme/demo"].files.values()]:
        for secret in (place, "alicesecret", "ALICESECRET", TOKEN, "private.txt"):
            assert secret.encode() not in body, body[:2000]
    for name in ("README.md", "results.json", "study.yaml", "quantmill.json"):
        assert not host.search(study.hub.repositories["models/acme/demo"].files[name])
    assert "checkpoint" in study.hub.repositories["models/acme/demo"].files["study.yaml"].decode()
    published = json.loads(study.hub.repositories["models/acme/demo"].files["results.json"])
    assert published["tasks"] == [task | {"missing": {"flips": "not published"}}]


@pytest.mark.parametrize("kind", ["path", "token"])
def test_a_checkpoint_file_that_names_the_machine_is_refused(study: Study, kind: str) -> None:
    folder = study.build("gptq-int4", {"model.safetensors": 9})
    (folder / "tokenizer_config.json").write_text({"path": f'"{study.root}/run"', "token": TOKEN}[kind])
    study.build("gptq-int4", {"model.safetensors": 9})
    result = study.push("gptq-int4")
    assert result.returncode == 1
    said = {"path": "a path of this machine", "token": "your token"}[kind]
    assert result.stderr.startswith(f"error: tokenizer_config.json: holds {said}")
    assert TOKEN not in result.stderr
    assert not study.hub.repositories


FIND = """
import sys, pathlib
from quantmill.publish import public
public.PIECE = 10
for where in range(40):
    path = pathlib.Path(sys.argv[1])
    path.write_bytes(b"-" * where + b"/home/alice/" + b"-" * 30)
    assert public.first_held(path, [b"/home/bob/", b"/home/alice/"]) == b"/home/alice/", where
    assert public.first_held(path.read_bytes(), [b"/home/alice/x"]) is None
"""


def test_needles_across_two_pieces_are_found(tools_python: Path, tmp_path: Path) -> None:
    subprocess.run([tools_python, "-c", FIND, tmp_path / "file"], cwd=REPO / "scripts", check=True)


def test_only_texts_of_known_words_are_published(tools_python: Path) -> None:
    found, withheld = shown(tools_python, {"warnings": [*SENTENCES]})
    expected = [text if harmless else "not published" for text, harmless in SENTENCES.items()]
    assert found == {"warnings": expected}
    assert len(withheld) == expected.count("not published")
    assert all(
        repr(text)[1:5] in line for text, line in zip((t for t in SENTENCES if not SENTENCES[t]), withheld, strict=True)
    )


def test_options_that_name_a_place_are_not_published(tools_python: Path) -> None:
    options = {
        "kv_cache_dtype": "fp8_e5m2",
        "max_num_seqs": 8,
        "attention_backend": "FLASH_ATTN",
        "speculative_config": {"method": "ngram", "model": "/srv/draft"},
        "lora_path": "mine",
        "api_key": "abcdef",
        "rope": "a:b",
        "url": "http://gpu7:1",
        "/home/alice": 1,
        "gpu7.corp:30000": {"x": 1},
        "draft": "models/draft",
        "level": 10**400,
    }
    found, withheld = shown(tools_python, {"options": options, "size_bytes": float("1e308")})
    assert found["options"] == {
        "kv_cache_dtype": "fp8_e5m2",
        "max_num_seqs": 8,
        "attention_backend": "FLASH_ATTN",
        "speculative_config": {"method": "ngram", "model": "not published"},
        "lora_path": "not published",
        "api_key": "not published",
        "rope": "not published",
        "draft": "not published",
        "level": 10**400,
    }
    assert len(withheld) == 8


RECORDED = """
import json, sys
from pathlib import Path
from quantmill.publish import public
for path in map(Path, sys.argv[1:]):
    content = json.loads(path.read_text())
    shown = public.of_study(content)
    for row in content["rows"]:
        public.row(row, shown)
    print("\\n".join(shown.withheld))
"""
# withheld in recorded rows: a log's name, errors of libraries, and words that Quantmill no longer uses
LOST = ("artifacts/logs/", "CUDA error", "eager", "HQQBackend.PYTORCH", ".arguments: ")


def test_recorded_rows_are_published(tools_python: Path) -> None:
    command = [tools_python, "-c", RECORDED, *sorted(REPO.glob("results/*/results.json"))]
    result = subprocess.run([*map(str, command)], cwd=REPO / "scripts", capture_output=True, text=True, check=True)
    withheld = [line for line in result.stdout.splitlines() if line]
    assert len(withheld) > 100
    assert not [line for line in withheld if not any(each in line for each in LOST)]


def test_withheld_values_are_listed(study: Study) -> None:
    row = study.row("gptq-int4")
    row["warnings"] = ["see /home/alice/x.log"]
    row["missing"]["joules_per_token"] = "failed: gpu7.corp:30000 does not answer"
    row["versions"] = {"torch": "2.13.0+cu130", "arguments": "--model=/srv/x", "kernel": "MarlinLinear"}
    study.write()
    result = study.push("gptq-int4")
    assert result.returncode == 0, result.stderr
    listed = [line for line in result.stderr.splitlines() if line.startswith("not published: ")]
    assert {line.partition(": ")[2].partition(": ")[0] for line in listed} == {
        "rows.gptq-int4.warnings",
        "rows.gptq-int4.missing.joules_per_token",
        "rows.gptq-int4.versions.arguments",
    }
    files = study.hub.repositories["models/acme/demo"].files
    published = json.loads(files["results.json"])["rows"][0]
    assert published["warnings"] == ["not published"]
    assert published["missing"]["joules_per_token"] == "failed: the reason is not published"
    assert published["versions"] == {"torch": "2.13.0+cu130", "arguments": "not published", "kernel": "MarlinLinear"}
    assert not [name for name, content in files.items() if b"alice" in content or b"gpu7" in content]
