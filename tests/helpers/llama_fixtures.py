"""llama.cpp as it was compiled on this machine; tests that want it are skipped where it was not."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CHARACTERS, REPO, interpreter

from quantmill.llamacpp import compile


@pytest.fixture(scope="session")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory, call: Callable) -> Path:
    """Return the folder of llamacpp.compile, made from the user's cache."""
    if not list(compile.cache().glob("llama.cpp-*/ready")):
        pytest.skip("llama.cpp is not compiled here; `make llama.cpp` does it, in ten minutes")
    folder = tmp_path_factory.mktemp("llama.cpp") / "llama.cpp"
    tools = interpreter("llama_cpp").parent
    result = call(sys.executable, REPO / "scripts/quantmill", "llamacpp.compile", folder, "--tools", tools)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def run_gguf(llama_cpp: Path, call: Callable) -> Callable:
    """Run one of our programs in envs/llama_cpp over that llama.cpp."""

    def run(program: str, *arguments: object) -> Any:
        words = [REPO / program] if "/" in program else [REPO / "scripts/quantmill", program]
        environment = {"QUANTMILL_LLAMA_CPP": str(llama_cpp), "PYTHONPATH": str(REPO / "scripts")}
        return call(interpreter("llama_cpp"), *words, *arguments, **environment)

    return run


@pytest.fixture(scope="session")
def gguf_model(
    tmp_path_factory: pytest.TempPathFactory, call: Callable, torch_python: Path, tools_python: Path
) -> Path:
    """Prepare the demo like the workflow: safetensors, tokens, transformers' expected predictions, and the texts."""
    root = tmp_path_factory.mktemp("model")
    for name, length in (("evaluation", None), ("calibration", CHARACTERS)):
        (root / f"{name}.txt").write_text((REPO / f"config/{name}.txt").read_text()[:length])

    def run(python: Path, program: str, *arguments: object) -> None:
        result = call(python, REPO / "scripts/quantmill", program, *arguments)
        assert result.returncode == 0, result.stderr

    run(tools_python, "fetch.link", REPO / "demo", root / "source")
    run(tools_python, "checkpoint.to_safetensors", root / "source", root / "safetensors")
    for name, kind in (("evaluation", "evaluation"), ("calibration", "document")):
        files = root / "safetensors", root / f"{name}.txt", root / f"{name}.json"
        run(torch_python, "tokens.tokenize_texts", *files, "--as", kind)
    evaluation = ["--evaluation", root / "evaluation.json"]
    run(torch_python, "gate.expected", root / "source", root / "expected.json", *evaluation)
    return root


@pytest.fixture(scope="session")
def build_gguf(gguf_model: Path, run_gguf: Callable) -> Callable[..., Path]:
    """Build the demo's GGUF of a type, once; those that are quantized from f16 and with an importance matrix."""
    gate = [
        "--gate-reference",
        gguf_model / "expected.json",
        "--gate-evaluation",
        gguf_model / "evaluation.json",
        "--device",
        "cpu",
        *("--layout", "gguf", "--engine", "llama_cpp"),
    ]

    def make(kind: str) -> Path:
        out = gguf_model / f"gguf-{kind}"
        if out.exists():
            return out
        how: list[object] = ["--evaluation", gguf_model / "evaluation.json", "--text", gguf_model / "evaluation.txt"]
        if kind not in ("f32", "f16", "bf16"):
            if not (gguf_model / "imatrix").exists():
                text = ["--text", gguf_model / "calibration.txt", "--calibration", gguf_model / "calibration.json"]
                text += ["--evaluation", gguf_model / "evaluation.json"]
                size = ["--samples", 4, "--sequence-length", 128]
                result = run_gguf("build.imatrix", make("f16"), gguf_model / "imatrix", *text, *size)
                assert result.returncode == 0, result.stderr
            how = ["--base", make("f16"), "--imatrix", gguf_model / "imatrix"]
        how += ["--parameters", json.dumps({"type": kind}), "--name", "demo"]
        result = run_gguf("build.gguf", gguf_model / "safetensors", out, *how, *gate)
        assert result.returncode == 0, result.stderr
        return out

    return make
