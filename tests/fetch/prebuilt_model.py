"""A small model, artifacts of it that others may have built, and the program that takes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weight_files import save_file

LAYER = "model.layers.0.mlp.up_proj"
INPUTS, OUTPUTS, GROUP, VOCABULARY = 64, 16, 32, 5
CONFIG = {
    "model_type": "llama",
    "hidden_size": INPUTS,
    "intermediate_size": OUTPUTS,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
TOKENIZER = {"model": {"vocab": {token: number for number, token in enumerate("abcde")}}, "added_tokens": []}
QUANTIZATION = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}
random = np.random.default_rng(3)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], tokenizer: Any = TOKENIZER) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file(tensors, folder / "model.safetensors")
    return folder


def halves(*shape: int) -> np.ndarray:
    return random.normal(0, 0.02, shape).astype(np.float16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write this model: an embedding, one layer, a norm."""
    tensors = {"model.embed_tokens.weight": halves(VOCABULARY, INPUTS), f"{LAYER}.weight": halves(OUTPUTS, INPUTS)}
    folder = write(tmp_path / "model", CONFIG, tensors | {"model.norm.weight": halves(INPUTS)})
    (folder / "quantmill.json").write_text(json.dumps({"source": {}, "parameter_count": 1408, "files": {}}))
    return folder


def pack(layout: str = "gptq", bits: int = 4) -> dict[str, np.ndarray]:
    shape = (INPUTS * bits // 32, OUTPUTS) if layout == "gptq" else (INPUTS, OUTPUTS * bits // 32)
    words = random.integers(0, 2**31, shape).astype(np.int32)
    zeros = np.zeros((INPUTS // GROUP, OUTPUTS * bits // 32), np.int32)
    parts = {"qweight": words, "qzeros": zeros, "scales": halves(INPUTS // GROUP, OUTPUTS)}
    return {
        "model.embed_tokens.weight": halves(VOCABULARY, INPUTS),
        "model.norm.weight": halves(INPUTS),
        **{f"{LAYER}.{name}": value for name, value in parts.items()},
    }


def write_theirs(tmp_path: Path, tensors: Any = None, tokenizer: Any = TOKENIZER, **config: Any) -> Path:
    """Write an artifact of this model in GPTQ's layout, with the given changes."""
    words = {"quantization_config": QUANTIZATION} | config
    return write(tmp_path / "theirs", CONFIG | words, tensors or pack(), tokenizer)


@pytest.fixture
def fetch_prebuilt(run_program: Callable, model: Path, tmp_path: Path) -> Callable[..., str]:
    """Run the program and return what it said: one line if it refuses the artifact, which leaves nothing."""

    def run(theirs: object, layout: str = "gptq", *more: object, good: bool = False, **environment: str) -> str:
        engine = "llama_cpp" if layout == "gguf" else "gptqmodel"
        words = "--model", model, "--layout", layout, "--format", "theirs", "--engine", engine
        result = run_program("fetch.prebuilt", theirs, tmp_path / "out", *words, *more, **environment)
        assert (result.returncode == 0) == good, result.stderr
        if not good:
            assert not (tmp_path / "out").exists()
            assert not list(tmp_path.glob(".out*"))
            assert len(result.stderr.splitlines()) == 1
        return result.stderr

    return run


@pytest.fixture
def fetch(fetch_prebuilt: Callable[..., str]) -> Callable[..., str]:
    """Return the same; modules of one layout override this name."""
    return fetch_prebuilt


def refusal(fetch: Callable, tmp_path: Path, config: dict[str, Any], tensors: Any = None, **more: Any) -> str:
    """Return what is said of an artifact that is not this model's."""
    layout = more.pop("layout", "gptq")
    return fetch(write_theirs(tmp_path, tensors, **config, **more), layout)
