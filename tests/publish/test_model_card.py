"""What is uploaded beside the weights: the card as the hub's own parsers read it, and nothing of this machine."""

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO
from hub_server import Hub, serve
from published_study import HEAD, TOKEN, Study

PARSE = """
import json, sys
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
data = ModelCard(sys.stdin.read(), ignore_metadata_errors=False).data
name, results = model_index_to_eval_results(data.to_dict()["model-index"])
head = {key: value for key, value in data.to_dict().items() if key != "model-index"}
print(json.dumps({"head": head, "name": name, "results": [vars(each) for each in results]}))
"""
QUALITIES = {"perplexity", "kld_mean", "top1_agreement"}  # what the head tells of a row without a speed
COMPILE = "import sys; compile(sys.stdin.read(), 'snippet', 'exec')"
SOURCE = {
    "kind": "hub",
    "hub": "acme/base",
    "revision": "main",
    "commit": "c" * 40,
    "sha256": {"model.safetensors": "e"},
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as server:
        server.storage.writers = {TOKEN}
        yield server


@pytest.fixture
def study(tmp_path: Path, hub: Hub, tools_python: Path) -> Study:
    return Study(tmp_path / "alicesecret", hub, tools_python)


def push_files(study: Study, *names: str, **words: Any) -> dict[str, bytes]:
    """The files of a repository after an upload."""
    result = study.push(*names, **words)
    assert result.returncode == 0, result.stderr
    return study.hub.repositories["models/acme/demo"].files


def read_head(study: Study, card: bytes) -> dict[str, Any]:
    """A card's head, by the hub's own parsers."""
    found = subprocess.run([study.python, "-c", PARSE], input=card, capture_output=True, check=True)
    return json.loads(found.stdout)


def test_the_head_is_the_hubs_and_its_figures_are_the_rows(study: Study) -> None:
    study.build("gptq-int4", {"model.safetensors": 9}, source=SOURCE)
    found = read_head(study, push_files(study, "gptq-int4")["README.md"])
    expected = {"base_model": "acme/base", "base_model_relation": "quantized", "license": "apache-2.0"}
    assert found["head"].items() >= (expected | {"library_name": "transformers"}).items()
    row = study.row("gptq-int4")
    figures = {each["metric_type"]: each for each in found["results"]}
    names = ("perplexity", "kld_mean", "top1_agreement", "tokens_per_second", "ttft_ms_p50", "tpot_ms_p50")
    assert {name: each["metric_value"] for name, each in figures.items()} == {name: row[name] for name in names}
    quality, speed = figures["perplexity"]["metric_args"], figures["tokens_per_second"]["metric_args"]
    assert quality["text_sha256"] == row["protocol"]["quality"]["text_sha256"]
    assert (speed["device"], speed["new_tokens"]) == (row["device"], 200)
    assert {each["task_type"] for each in found["results"]} == {"text-generation"}


def test_the_text_says_what_was_measured_and_how_to_make_it(study: Study) -> None:
    study.build("gptq-int4", {"model.safetensors": 9}, source=SOURCE)
    files = push_files(study, "gptq-int4")
    card, row = files["README.md"].decode(), study.row("gptq-int4")
    assert f"Measured on {row['device']}; batch 1, 200 new tokens after each prompt, 2 processes, 2 repeats" in card
    assert "perplexity by gptq-2048, 30 windows of up to 512 tokens" in card
    line = "| `gptq-int4` | gptqmodel, bfloat16, 2 threads | 268 (256 to 281) | 46.55 | 1.0112 (1.0068 to 1.0157) |"
    assert line in card  # as in the README's table, which the same results make
    assert f"[acme/base](https://huggingface.co/acme/base) at commit `{'c' * 40}`" in card
    assert f"SHA-256 `{row['artifact']['calibration_sha256']}`, 16 samples, 512 tokens each" in card
    assert "snakemake --cores 8 artifacts/demo/gptq-int4 --configfile study.yaml" in card
    assert "![Quality over speed of all formats of this model](quality-speed.png)" in card
    for name, words in json.loads(files["quantmill.json"])["files"].items():
        if name != "README.md":
            assert f"| `{name}` | {words['bytes']} | `{words['sha256']}` |" in card


def test_a_disturbed_speed_is_said_and_is_no_result_of_the_hubs(study: Study) -> None:
    study.row("gptq-int4")["interference"] = ["other programs took 40% of the processors' time"]
    study.write()
    card = push_files(study, "gptq-int4")["README.md"]
    assert "281), disturbed |" in card.decode()
    assert "- `gptq-int4`: other programs took 40% of the processors' time" in card.decode()
    assert {each["metric_type"] for each in read_head(study, card)["results"]} == QUALITIES


def test_a_row_without_a_speed_says_why(study: Study) -> None:
    row = study.row("gptq-int4")
    lost = ("device", "device_details", "latency_summary", "other_modes", "versions", "threads", "mode", "compute_type")
    for name in (*lost, "tokens_per_second", "tokens_per_second_low", "tokens_per_second_high", "peak_memory_bytes"):
        row[name] = None
    row["interference"] = row["protocol"]["latency"] = None
    row["missing"]["tokens_per_second"] = "transformers unpacks the weights | <b>: not the format's speed"
    study.write()
    card = push_files(study, "gptq-int4")["README.md"]
    assert "- `gptq-int4`: transformers unpacks the weights \\| &lt;b>: not the format's speed" in card.decode()
    assert "Measured perplexity by gptq-2048" in card.decode()
    assert {each["metric_type"] for each in read_head(study, card)["results"]} == QUALITIES


def test_each_engine_that_was_measured_has_its_command(study: Study) -> None:
    options = {"max_num_seqs": 64, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    options["environment"] = {"VLLM_CPU_KVCACHE_SPACE": "4", "A": "b c"}
    versions = {"vllm": "0.32.0", "arguments": "--model=gptq-int4"}
    study.add_row("gptq-int4", run="served", engine="vllm-serve", options=options, versions=versions)
    study.add_row("gptq-int4", run="theirs", engine="tgi", options={"url": "http://h:1"}, versions={"tgi": "3.1"})
    study.write()
    card = push_files(study, "gptq-int4")["README.md"].decode()
    python = card.partition("```python\n")[2].partition("```")[0]
    subprocess.run([study.python, "-c", COMPILE], input=python.encode(), check=True)
    assert 'GPTQModel.load("acme/demo", device="cpu")' in python
    assert "gptqmodel 7.6.0, kernel TorchFusedLinear:" in card  # which a library may not choose by itself
    shell = (
        card.partition("`gptq-int4@served`, as measured in vllm 0.32.0")[2].partition("```sh\n")[2].partition("```")[0]
    )
    assert "hf download acme/demo --local-dir gptq-int4\n" in shell
    assert "python3 -P -m vllm.entrypoints.openai.api_server --model=gptq-int4 " in shell
    assert "--max-num-seqs 64" in shell
    assert " VLLM_CPU_KVCACHE_SPACE=4 'A=b c' python3 -P -m " in shell  # the run's, not Quantmill's own
    assert "--max-model-len 514" in shell  # of the artifact's own config.json
    assert "--speculative-config '{" in shell  # quoted for the shell
    assert "Measured in tgi. Its own manual says" in card


def test_options_of_a_library_are_its_arguments(study: Study) -> None:
    study.add_row(
        "fp16", run="bf16", options={"dtype": "bfloat16", "attn_implementation": "eager"}, compute_type="bfloat16"
    )
    options = {"max_num_seqs": 8, "environment": {"VLLM_CPU_INT4_W4A8": "0", "A": "b c"}}
    study.add_row("fp16", run="vllm", engine="vllm", options=options, versions={"vllm": "0.32.0"})
    study.write()
    card = push_files(study, "fp16")["README.md"].decode()
    parts = [part.partition("```")[0] for part in card.split("```python\n")[1:]]
    for part in parts:
        subprocess.run([study.python, "-c", COMPILE], input=part.encode(), check=True)
    assert len(parts) == 3
    assert 'from_pretrained("acme/demo", dtype="float32").to("cpu")' in parts[0]
    assert 'from_pretrained("acme/demo", dtype="bfloat16", attn_implementation=\'eager\').to("cpu")' in parts[1]
    assert 'LLM("acme/demo", enable_prefix_caching=False, seed=0' in parts[2]  # as Quantmill measured it
    assert "max_model_len=514, max_num_seqs=8)" in parts[2]
    assert "Measured with `VLLM_CPU_INT4_W4A8=0 A='b c'` in the environment.\n\n```python" in card


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
    push_files(study, "gptq-int4", more=more, USER="alicesecret", LOGNAME="alicesecret", HOME=place)
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
def test_a_file_of_the_checkpoint_that_names_the_machine_is_not_uploaded(study: Study, kind: str) -> None:
    folder = study.build("gptq-int4", {"model.safetensors": 9})
    (folder / "tokenizer_config.json").write_text({"path": f'"{study.root}/run"', "token": TOKEN}[kind])
    study.build("gptq-int4", {"model.safetensors": 9})
    result = study.push("gptq-int4")
    assert result.returncode == 1
    said = {"path": "a path of this machine", "token": "your token"}[kind]
    assert result.stderr.startswith(f"error: tokenizer_config.json: holds {said}")
    assert TOKEN not in result.stderr
    assert not study.hub.repositories


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (None, "names no licence"),
        ("# A model\n", "names no licence"),
        ("---\nlicense: [\n---\n", "names no licence"),
        ("---\nlicense: unknown\n---\n", "names no licence"),
        ("---\nlicense: other\n---\n", "names no licence"),
        ("---\nlicense: cc-by-nc-nd-4.0\n---\n", "its licence, cc-by-nc-nd-4.0, forbids to publish"),
        ("---\nlicense: CC-BY-ND-4.0\n---\n", "forbids to publish"),
    ],
    ids=["no card", "no head", "damaged", "unknown", "other", "no derivatives", "in capitals"],
)
def test_a_licence_is_the_sources_or_said(study: Study, head: str | None, reason: str) -> None:
    card = study.source / "README.md"
    card.unlink()
    if head:
        card.write_text(head)
    result = study.push("gptq-int4")
    assert result.returncode == 1
    assert result.stderr.startswith("error: artifacts/demo/source: ")
    assert reason in result.stderr
    assert "say so: publish: {license: ID}" in result.stderr
    assert not study.hub.log  # before the hub is asked for anything
    found = push_files(study, "gptq-int4", more=("--source", "artifacts/demo/source", "--license", "mit"))
    assert read_head(study, found["README.md"])["head"]["license"] == "mit"


def test_a_licence_of_its_own_goes_along_with_its_text(study: Study) -> None:
    words = "license: other\nlicense_name: acme-1\nlicense_link: https://acme.test/licence\n"
    (study.source / "README.md").write_text(HEAD.replace("license: apache-2.0\n", words))
    (study.source / "LICENSE.txt").write_text("Terms.\n")
    (study.source / "NOTICE").write_text("Notice.\n")
    files = push_files(study, "gptq-int4")
    assert (files["LICENSE.txt"], files["NOTICE"]) == (b"Terms.\n", b"Notice.\n")
    head = read_head(study, files["README.md"])["head"]
    assert (
        head.items()
        >= {"license": "other", "license_name": "acme-1", "license_link": "https://acme.test/licence"}.items()
    )


def test_gguf_files_of_a_model_are_one_repository(study: Study) -> None:
    for name in ("gguf-q4_k_m", "gguf-q8_0"):
        options = {"n_batch": 256, "type_k": "q8_0"} if name == "gguf-q8_0" else {}
        study.add_row("gptq-int4", format=name, engine="llama_cpp", options=options, versions={"llama.cpp": "0.3.34"})
        study.build(name, {"model.gguf": 1000}, like="gptq-int4")
    served = {"llama.cpp": "0.3.34", "arguments": "--model gguf-q8_0/model.gguf --threads 3"}
    study.add_row("gptq-int4", format="gguf-q8_0", run="served", engine="llama-server", options={}, versions=served)
    study.write()
    names = ("gguf-q4_k_m", "gguf-q8_0")
    files = push_files(study, *names, layout="gguf")
    weights = {name for name in files if name.endswith(".gguf")}
    assert weights == {"demo-Q4_K_M.gguf", "demo-Q8_0.gguf"}
    assert "config.json" not in files  # the file holds it
    card = files["README.md"].decode()
    assert 'filename="demo-Q4_K_M.gguf", n_gpu_layers=0)' in card
    assert 'filename="demo-Q8_0.gguf", n_gpu_layers=0, n_batch=256)' in card
    assert 'Measured with the options `{"type_k": "q8_0"}`, in the engine\'s words.' in card
    assert "hf download acme/demo demo-Q8_0.gguf --local-dir gguf-q8_0" in card
    assert "llama-server --model gguf-q8_0/demo-Q8_0.gguf" in card
    assert "--threads 3" in card
    assert read_head(study, files["README.md"])["head"]["library_name"] == "gguf"
    assert json.loads(files["quantmill.json"])["artifacts"].keys() == set(names)
    assert {row["format"] for row in json.loads(files["results.json"])["rows"]} == set(names)
    result = study.push("gguf-q8_0", layout="gguf")  # another study, which knows nothing of the other file
    assert result.returncode == 1
    assert "holds 'gguf-q4_k_m', which this study does not publish; add it to publish.formats" in result.stderr


def test_what_is_compiled_for_this_processor_stays_here(study: Study) -> None:
    study.build("gptq-int4", {"model.safetensors": 9, "model_lib.so": 9})
    files = push_files(study, "gptq-int4")
    assert "model_lib.so" not in files
    assert "model_lib.so" not in json.loads(files["quantmill.json"])["files"]


FIND = """
import sys, pathlib
from quantmill.publish import public
public.PIECE = 10
for where in range(40):
    path = pathlib.Path(sys.argv[1])
    path.write_bytes(b"-" * where + b"/home/alice/" + b"-" * 30)
    assert public.find(path, [b"/home/bob/", b"/home/alice/"]) == b"/home/alice/", where
    assert public.find(path.read_bytes(), [b"/home/alice/x"]) is None
"""


def test_what_lies_across_two_pieces_of_a_file_is_found(tools_python: Path, tmp_path: Path) -> None:
    subprocess.run([tools_python, "-c", FIND, tmp_path / "file"], cwd=REPO / "scripts", check=True)


def test_a_published_study_is_one(study: Study) -> None:
    """Its reference is a variant, and its tasks its author's own."""
    config = study.results["config"]
    config |= {"reference": "ct2-mine", "variants": {"ct2-mine": {"format": "ct2-int8", "parameter": 1}}}
    config["tasks"] = {"include": "mine", "names": ["quiz"], "chat_template": False, "metrics": {}}
    study.write()
    found = yaml.safe_load(push_files(study, "gptq-int4")["study.yaml"])
    assert found["formats"] == ["ct2-mine", "gptq-int4"]
    assert found["variants"].keys() == {found["reference"]}
    assert "tasks" not in found
    del config["tasks"]["include"]
    study.write()
    assert yaml.safe_load(push_files(study, "gptq-int4")["study.yaml"])["tasks"] == config["tasks"]


# texts of logs, devices and servers, and what of each may be read by strangers
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
    """What strangers may read of a value, and what is held back."""
    command = [python, "-c", READ]
    result = subprocess.run(
        command, cwd=REPO / "scripts", input=json.dumps(found), capture_output=True, text=True, check=True
    )
    kept, withheld = json.loads(result.stdout)
    return kept, withheld


def test_texts_of_known_words_are_published_and_no_others(tools_python: Path) -> None:
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
# of what recorded rows lack: a log's name, errors of libraries, and words that Quantmill no longer uses
LOST = ("artifacts/logs/", "CUDA error", "eager", "HQQBackend.PYTORCH", ".arguments: ")


def test_recorded_rows_are_published_but_for_names_of_logs_and_the_words_of_libraries(tools_python: Path) -> None:
    command = [tools_python, "-c", RECORDED, *sorted(REPO.glob("results/*/results.json"))]
    result = subprocess.run([*map(str, command)], cwd=REPO / "scripts", capture_output=True, text=True, check=True)
    withheld = [line for line in result.stdout.splitlines() if line]
    assert len(withheld) > 100
    assert not [line for line in withheld if not any(each in line for each in LOST)]


def test_what_is_not_published_is_listed_before_anything_is_sent(study: Study) -> None:
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
