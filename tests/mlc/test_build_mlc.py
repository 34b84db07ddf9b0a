"""build.mlc beside the weights: what is refused, the library, and MLC-LLM in its place."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPO
from in_process import run_program
from models import LLAMA, random_tensors, write_model

GOLDEN = REPO / "tests/data/mlc-q4f16_1"
STAND_IN = REPO / "tests/mlc/stand_in_python.py"


@pytest.fixture
def program(tmp_path: Path) -> Callable:
    """Run build.mlc; output in tmp_path/out."""

    def run(source: Path, *options: object, tool: str | None = None, **environment: str) -> Any:
        words = {"quantization": "q4f16_1"} | ({"tool": tool} if tool else {})
        engine = ["--engine", "quantmill-tvm", "--layout", "mlc", "--parameters", json.dumps(words)]
        return run_program("build.mlc", source, tmp_path / "out", *engine, *options, **environment)

    return run


def refusal(result: Any, tmp_path: Path) -> str:
    """Return the one line of a run that failed and left nothing."""
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert not [path.name for path in tmp_path.iterdir() if "out" in path.name]
    return lines[0]


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize(("dtype", "value"), [("F16", np.nan), ("BF16", -np.inf), ("F32", np.inf)])
def test_weights_that_are_not_finite_are_refused_by_name(
    program: Callable, tmp_path: Path, dtype: str, name: str, value: float
) -> None:
    tensors = random_tensors(LLAMA, dtype)
    tensors[name].reshape(-1)[-1] = value
    line = refusal(program(write_model(tmp_path / "m", LLAMA, tensors, dtype), "--weights-only"), tmp_path)
    assert line.startswith(f"error: {tmp_path / 'm/model.safetensors'}: {name} holds NaN, infinity or weights beyond")


def test_bfloat16_beyond_float16_is_refused(program: Callable, tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA, "BF16")
    tensors["lm_head.weight"][3, 4] = 65536.0
    line = refusal(program(write_model(tmp_path / "m", LLAMA, tensors, "BF16"), "--weights-only"), tmp_path)
    assert "lm_head.weight holds NaN, infinity or weights beyond 65,504" in line


def test_tensors_that_do_not_fit_the_config(program: Callable, tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA, "F16")
    name = "model.layers.1.self_attn.k_proj.weight"
    bias = "model.layers.0.self_attn.q_proj.bias"
    for number, (changed, dtype, message) in enumerate(
        (
            ({key: value for key, value in tensors.items() if key != name}, "F16", f"{name} is missing"),
            (tensors | {name: tensors[name][1:]}, "F16", f"{name} has shape (31, 64), where config.json says (32, 64)"),
            (tensors | {bias: np.zeros(64, np.float16)}, "F16", f"holds {bias}, which MLC's llama has no place for"),
            (tensors, "I32", "is I32, not a plain weight"),
        )
    ):
        source = write_model(tmp_path / str(number), LLAMA, changed, dtype)
        assert message in refusal(program(source, "--weights-only"), tmp_path)


def test_an_index_that_leaves_a_tensor_out(program: Callable, tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA, "F16")
    source = write_model(tmp_path / "m", LLAMA, tensors, files=[list(tensors)])
    index = source / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["model.norm.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    line = refusal(program(source, "--weights-only"), tmp_path)
    assert line == f"error: {index}: does not name model.norm.weight, which the shards hold; download it again"


def test_a_file_that_is_cut_off(program: Callable, tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", LLAMA, random_tensors(LLAMA, "F16"))
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-1])
    assert "where its header claims" in refusal(program(source, "--weights-only"), tmp_path)


def test_inverse_frequencies_and_a_tied_head_are_left_out(program: Callable, tmp_path: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    tensors = random_tensors(config, "F16")
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float16),
    }
    result = program(write_model(tmp_path / "m", config, tensors | extra), "--weights-only")
    assert result.returncode == 0, result.stderr
    cache = json.loads((tmp_path / "out/tensor-cache.json").read_text())
    names = [record["name"] for shard in cache["records"] for record in shard["records"]]
    assert not [name for name in names if "lm_head" in name or "inv_freq" in name]
    weights = sum(value.size for value in tensors.values()) + tensors["model.embed_tokens.weight"].size
    assert cache["metadata"]["BitsPerParam"] == cache["metadata"]["ParamBytes"] * 8 / weights


def golden(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "checkpoint", tmp_path / "m")
    (tmp_path / "m/model.safetensors.index.json").unlink()
    (tmp_path / "m/quantmill.json").write_text('{"source": {"kind": "test"}, "parameter_count": 127304}')
    (tmp_path / "m/tokenizer.json").write_text("{}")
    config = json.loads((tmp_path / "m/config.json").read_text())
    del config["rope_theta"]  # as transformers 5 writes it
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    return tmp_path / "m"


def test_either_a_library_or_weights_only(program: Callable, tmp_path: Path) -> None:
    source = golden(tmp_path)
    assert "one of the arguments --library --weights-only is required" in program(source).stderr
    line = refusal(program(source, "--library", tmp_path / "none.so"), tmp_path)
    assert "none.so: no such file; mlc.compile writes a model library" in line


def test_a_library_becomes_part_of_the_artifact(program: Callable, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"library")
    result = program(golden(tmp_path), "--library", tmp_path / "lib.so")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/model_lib.so").read_bytes() == (tmp_path / "lib.so").read_bytes()
    manifest = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert (manifest["engine"], manifest["gate"]) == ("quantmill-tvm", None)
    assert manifest["source"] == {"kind": "test"}
    assert "model_lib.so" in manifest["files"]
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_the_gate_refuses_a_library_that_fails(program: Callable, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"library")
    ids = {"ids": list(range(100)) * 60, "context": 128, "text_sha256": "", "bytes": 1, "words": 1}
    (tmp_path / "evaluation.json").write_text(json.dumps(ids))
    (tmp_path / "gate.json").write_text('{"perplexity": 10}')
    gate = ("--gate-reference", tmp_path / "gate.json", "--gate-evaluation", tmp_path / "evaluation.json")
    result = program(golden(tmp_path), "--library", tmp_path / "lib.so", "--device", "cpu", *gate)
    assert "out: refused by the quality gate: " in refusal(result, tmp_path)


def test_mlc_llm_runs_where_it_works(program: Callable, tmp_path: Path) -> None:
    source = golden(tmp_path)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    result = program(source, "--weights-only", "--mlc-llm-python", STAND_IN)
    assert result.returncode == 0, result.stderr
    manifest = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert (manifest["tool"], manifest["tool_version"]) == ("mlc_llm", "0.0.stand-in")
    assert manifest["weight_bytes_per_token"] == 100
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("params_shard_0.bin", "tensor-cache.json", "mlc-chat-config.json", "quantmill.json")
    }
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_mlc_llm_compiles_its_own_library_too(program: Callable, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"library")
    options = ("--library", tmp_path / "lib.so", "--mlc-llm-python", STAND_IN, "--device", "cpu")
    result = program(golden(tmp_path), *options, tool="mlc_llm")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/mlc_llm.so").read_text() == "compiled"
    assert (tmp_path / "out/model_lib.so").read_bytes() == b"library"


def test_auto_without_mlc_llm_writes_the_same_bytes(program: Callable, tmp_path: Path) -> None:
    source = golden(tmp_path)
    for kind in ("missing", "placeholder"):
        result = program(source, "--weights-only", "--mlc-llm-python", STAND_IN, STAND_IN=kind)
        assert result.returncode == 0, result.stderr
        assert json.loads((tmp_path / "out/quantmill.json").read_text())["tool"] == "quantmill"
        for expected in (GOLDEN / "expected").iterdir():
            assert (tmp_path / "out" / expected.name).read_bytes() == expected.read_bytes()
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "python", "message"),
    [
        ("missing", STAND_IN, "no working mlc_llm: "),
        ("placeholder", STAND_IN, "`mlc_llm convert_weight --help` has no --quantization"),
        ("", "/nowhere/python", "no working mlc_llm: it does not run"),
        ("", None, "--mlc-llm-python names no interpreter"),
        ("failing", STAND_IN, "convert_weight` failed: RuntimeError: no room; the tool builtin does not need it"),
    ],
)
def test_an_mlc_llm_that_fails_is_refused(
    program: Callable, tmp_path: Path, kind: str, python: Path | None, message: str
) -> None:
    named = ("--mlc-llm-python", python) if python else ()
    result = program(golden(tmp_path), "--weights-only", *named, tool="mlc_llm", STAND_IN=kind)
    assert message in refusal(result, tmp_path)


def test_builtin_asks_nobody(program: Callable, tmp_path: Path) -> None:
    result = program(golden(tmp_path), "--weights-only", "--mlc-llm-python", "/nowhere/python", tool="builtin")
    assert result.returncode == 0, result.stderr
