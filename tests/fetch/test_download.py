"""scripts/quantmill/fetch/model.py with the real huggingface_hub client against a hub on this machine."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import REPO
from hub_server import Fault, Hub, Repository, serve
from model_folders import demo_in_float8
from program_fixtures import Result

from quantmill.checkpoint import shards
from quantmill.checkpoint.selection import select
from quantmill.common import manifest
from quantmill.common.program import UserError

NAME = "acme/tiny"
TOKEN = "hf_secretsecretsecret"
Download = Callable[..., Result]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as server:
        server.repositories[f"models/{NAME}"] = Repository.of(REPO / "demo")
        yield server


@pytest.fixture
def download(hub: Hub, tmp_path: Path, run_program: Callable, monkeypatch: pytest.MonkeyPatch) -> Download:
    """Run the program against the hub, with a cache and a home of its own."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    words = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_ETAG_TIMEOUT": "5"}

    def run(*options: str, name: str = NAME, sleep: bool = True, **environment: str) -> Result:
        environment = words | {"HF_HUB_OFFLINE": "0"} | environment
        return run_program("fetch.model", name, tmp_path / "out", *options, sleep=sleep, **environment)

    return run


def refusal(result: Result, out: Path) -> str:
    """Return the one line that a refused download ends with."""
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert not out.exists()
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def test_a_model_at_a_commit_with_its_hashes(hub: Hub, download: Download, tmp_path: Path) -> None:
    repository = hub.repositories[f"models/{NAME}"]
    repository.files |= {"onnx/model.onnx": b"x", "tf_model.h5": b"x", "training_args.bin": b"x", "pic.png": b"x"}
    result = download()
    assert result.returncode == 0, result.stderr
    got = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    said = json.loads(got.pop("quantmill.json"))
    source = said["source"]
    assert set(said["parameters"]["left_out"]) >= {"onnx/model.onnx", "pic.png", "tf_model.h5", "training_args.bin"}
    assert result.stderr.count("not part of the model, so left out:") == 1
    assert got == {name: repository.files[name] for name in got}
    assert {"config.json", "tokenizer.json", "pytorch_model.bin.index.json"} <= set(got)
    assert not {"onnx", "model.onnx", "tf_model.h5", "training_args.bin", "pic.png"} & set(got)
    assert (source["hub"], source["revision"], source["commit"]) == (NAME, "main", repository.commit)
    asked = [path for _, path, _ in hub.log if "/resolve/" in path]
    assert all(f"/resolve/{repository.commit}/" in path for path in asked)  # the branch is resolved once
    assert sum(hub.bytes_sent[f"/cdn/models/{NAME}/{name}"] for name in got) == sum(
        len(content) for name, content in got.items() if name.endswith(".bin")
    )


def test_safetensors_win_over_bin() -> None:
    names = [
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "tokenizer.json",
        "README.md",
        "a/config.json",
        "quantmill.json",
        "results.json",
    ]
    assert select("x", names) == ["model.safetensors", "README.md", "config.json", "tokenizer.json"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin", "consolidated.safetensors"]
    assert sorted(select("x", ["config.json", *shards, *others])) == sorted(["config.json", *shards])
    for missing in (["config.json"], ["model.safetensors"], ["config.json", "model.gguf"]):
        with pytest.raises(UserError, match="holds no"):
            select("x", missing)


def test_the_hubs_cache_and_artifacts_share_nothing(download: Download, tmp_path: Path) -> None:
    result = download()
    assert result.returncode == 0, result.stderr
    blobs = [path for path in (tmp_path / "home").rglob("blobs/*") if path.is_file()]
    assert blobs
    for path in blobs:
        with path.open("r+b") as file:
            file.write(b"another")
    files = json.loads((tmp_path / "out/quantmill.json").read_text())["files"]
    assert {path.name: manifest.sha256(path) for path in (tmp_path / "out").iterdir() if path.name in files} == {
        name: entry["sha256"] for name, entry in files.items()
    }


def test_a_dropped_connection_is_resumed_where_it_broke(hub: Hub, download: Download, tmp_path: Path) -> None:
    weights = random.Random(0).randbytes(24_000_000)
    hub.repositories[f"models/{NAME}"] = Repository({"config.json": b"{}", "model.safetensors": weights})
    hub.faults = [Fault("GET /cdn/", times=2, drop_after=12_000_000)]
    result = download(sleep=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/model.safetensors").read_bytes() == weights
    ranges = [headers.get("Range") for method, path, headers in hub.log if path.startswith("/cdn") and method == "GET"]
    block = 10 * 2**20  # the client keeps whole blocks
    assert ranges == [None, f"bytes={block}-", f"bytes={2 * block}-"]


def test_files_before_a_failure_are_not_refetched(hub: Hub, download: Download, tmp_path: Path) -> None:
    broken = "pytorch_model-00003-of-00003.bin"
    hub.faults = [Fault(f"/cdn/models/{NAME}/{broken}", status=403)]
    assert "(403)" in refusal(download(), tmp_path / "out")
    sent = dict(hub.bytes_sent)
    hub.faults = []
    assert download().returncode == 0
    again = {path for path, count in hub.bytes_sent.items() if path.startswith("/cdn") and count > sent.get(path, 0)}
    assert again == {f"/cdn/models/{NAME}/{broken}"}


@pytest.mark.parametrize(
    "fault",
    [
        Fault("/cdn/", times=2, status=503),
        Fault("GET /api/", times=1, status=502),
        Fault("/resolve/", times=1, status=429, headers={"Retry-After": "1"}),
        Fault("/cdn/", times=1, status=429, headers={"Retry-After": "1"}),
        Fault("/cdn/", times=10, delay=0.02),
    ],
    ids=["503", "502 of the API", "429 of HEAD", "429 of GET", "slow"],
)
def test_passing_failures_are_retried(hub: Hub, download: Download, fault: Fault) -> None:
    hub.faults = [fault]
    result = download(sleep=fault.status == 429)
    assert result.returncode == 0, result.stderr


def test_shards_that_are_named_after_the_whole_file() -> None:
    shards = [f"model.safetensors-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = "model.safetensors.index.json"
    assert select("a/b", [*shards, index, "config.json"]) == [index, *shards, "config.json"]


def test_quantized_weights_are_refused_before_they_are_fetched(hub: Hub, download: Download, tmp_path: Path) -> None:
    repository = hub.repositories[f"models/{NAME}"]
    config = json.loads(repository.files["config.json"]) | {"quantization_config": {"quant_method": "gptq"}}
    repository.files["config.json"] = json.dumps(config).encode()
    said = refusal(download(), tmp_path / "out")
    assert said == f"error: {NAME}: its weights are quantized (gptq); name a model with the original weights"
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.stat().st_size > 10**6]


def test_weights_in_float8_are_decoded(hub: Hub, download: Download, tmp_path: Path) -> None:
    """The manifest has the hashes of the hub's files. Another file of weights in the cache changes nothing."""
    repository = hub.repositories[f"models/{NAME}"] = Repository.of(demo_in_float8(tmp_path / "published"))
    assert download().returncode == 0
    shutil.rmtree(tmp_path / "out")
    (snapshot,) = (tmp_path / "home/hub/models--acme--tiny/snapshots").iterdir()
    (snapshot / "model-00001-of-00002.safetensors").write_bytes(b"of another tool")
    result = download()
    assert result.returncode == 0, result.stderr
    source = manifest.read_checked(tmp_path / "out")["source"]
    weights = {"model.safetensors": repository.files["model.safetensors"]}
    assert source["sha256"] == {name: hashlib.sha256(content).hexdigest() for name, content in weights.items()}
    assert (source["hub"], source["commit"], source["decoded"]["layout"]) == (NAME, repository.commit, "fp8")
    found = shards.find(tmp_path / "out")
    assert {tensor.dtype for tensor in found.tensors().values()} == {"F16"}  # the demo's
    assert found.tensors().keys() == shards.find(REPO / "demo").tensors().keys()
    assert "quantization_config" not in found.config()
    assert (tmp_path / "out/tokenizer.json").read_bytes() == repository.files["tokenizer.json"]


@pytest.mark.parametrize("file", ["pytorch_model-00001-of-00003.bin", "tokenizer.json"])
def test_wrong_bytes_are_refused_and_not_kept(hub: Hub, download: Download, tmp_path: Path, file: str) -> None:
    hub.faults = [Fault(f"/{file}", times=100, corrupt=True)]
    assert f"{file} came with other bytes than the hub's hash says" in refusal(download(), tmp_path / "out")
    hub.faults = []
    assert download().returncode == 0


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ({"gated": True, "token": TOKEN}, {}, "is gated; accept its terms at http://127.0.0.1"),
        ({"gated": True, "token": TOKEN}, {"HF_TOKEN": "hf_other"}, "is gated; accept its terms"),
        ({"token": TOKEN}, {}, "no such repository, or it is private"),
        ({}, {"HF_TOKEN": "bad_token"}, "does not accept your token (401)"),
    ],
    ids=["gated", "gated, other token", "private", "bad token"],
)
def test_refusals_are_one_line(
    hub: Hub, download: Download, tmp_path: Path, options: dict, environment: dict, message: str
) -> None:
    hub.repositories[f"models/{NAME}"] = Repository.of(REPO / "demo", **options)
    result = download(**environment)
    assert message in refusal(result, tmp_path / "out")
    assert not any(token in result.stderr for token in environment.values())


def test_the_token_goes_only_to_the_hub(hub: Hub, download: Download, tmp_path: Path) -> None:
    hub.repositories[f"models/{NAME}"] = Repository.of(REPO / "demo", gated=True, token=TOKEN)
    result = download(HF_TOKEN=TOKEN)
    assert result.returncode == 0, result.stderr
    assert TOKEN not in result.stderr + result.stdout + (tmp_path / "out/quantmill.json").read_text()
    hosts = {headers["Host"].split(":")[0] for _, _, headers in hub.log if "Authorization" in headers}
    assert hosts == {"127.0.0.1"}  # and not the storage that it redirects to


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ({"name": "acme/other"}, {}, "no such repository"),
        ({"options": ["--revision", "gone"]}, {}, "has no revision gone"),
        ({"name": "a/b/c"}, {}, "is not a repository's name"),
        ({}, {"HF_HUB_OFFLINE": "1"}, "is not in the cache"),
        ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot reach http://127.0.0.1:9"),
    ],
    ids=["404", "revision", "name", "offline", "no network"],
)
def test_missing_names_are_one_line(
    download: Download, tmp_path: Path, arguments: dict, environment: dict, message: str
) -> None:
    names = {"name": arguments["name"]} if "name" in arguments else {}
    result = download(*arguments.get("options", []), sleep=False, **names, **environment)
    assert message in refusal(result, tmp_path / "out")


def test_offline_takes_what_the_cache_has(hub: Hub, download: Download, tmp_path: Path) -> None:
    assert download().returncode == 0
    first = (tmp_path / "out/quantmill.json").read_text()
    asked = len(hub.log)
    result = download(HF_HUB_OFFLINE="1")
    assert result.returncode == 0, result.stderr
    assert len(hub.log) == asked
    again = (tmp_path / "out/quantmill.json").read_text()
    assert json.loads(again)["source"] == json.loads(first)["source"]
    assert json.loads(again)["files"] == json.loads(first)["files"]


def test_a_full_disk_is_known_beforehand(hub: Hub, download: Download, tmp_path: Path) -> None:
    repository = hub.repositories[f"models/{NAME}"]
    real = repository.files["pytorch_model-00001-of-00003.bin"]

    class Huge(bytes):
        def __len__(self) -> int:
            return 10**18

    repository.files["pytorch_model-00001-of-00003.bin"] = Huge(real)
    assert "1000000000.0 GB are to be downloaded" in refusal(download(), tmp_path / "out")
    assert not hub.bytes_sent or not any(path.startswith("/cdn") for path in hub.bytes_sent)


def test_a_short_context_is_refused_before_any_weights(hub: Hub, download: Download, tmp_path: Path) -> None:
    """The demo's is 512 tokens."""
    assert refusal(download("--most-tokens", "513"), tmp_path / "out") == (
        f"error: {NAME}: its context is 512 tokens, and the study asks for 513, a prompt and its answer; "
        "lower latency.new_tokens, the lengths of loads, or memory_at.context"
    )
    assert not any("pytorch_model" in path for _, path, _ in hub.log)
    assert download("--most-tokens", "512").returncode == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, which is more than any model has (1024)"),
        ({"pad_token_id": 2048}, "pad_token_id is 2048, and the vocabulary ends at 2047"),
    ],
)
def test_an_impossible_config_is_refused_before_any_weights(
    hub: Hub, download: Download, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    files = hub.repositories[f"models/{NAME}"].files
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | change).encode()
    assert refusal(download(), tmp_path / "out").startswith(f"error: {NAME}/config.json: {message}")
    assert not any("pytorch_model" in path for _, path, _ in hub.log)
