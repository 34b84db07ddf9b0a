"""Parts of a source's folder that no tool may see: programs, kernels, another quantization's files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO

from quantmill.checkpoint import portable

NAMED = {
    "auto_map": {"AutoModelForCausalLM": "model.Model"},
    "attn_implementation": "somebody/a-kernel",
    "_attn_implementation": "flash_attention_3",
    "experts_implementation": "x",
    "use_kernels": True,
}


def test_keys_are_left_out_wherever_they_stand() -> None:
    config = {"a": 1, "text_config": {"b": [{"c": 2} | NAMED]} | NAMED} | NAMED
    assert portable.config(config) == {"a": 1, "text_config": {"b": [{"c": 2}]}}
    assert portable.config(None) is None


@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_foreign_keys_reach_no_artifact(run_program: Callable, tmp_path: Path, form: str) -> None:
    """Neither on the way from .bin nor where safetensors are linked."""
    model = tmp_path / "model"
    model.mkdir()
    for file in (REPO / "demo").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    if form == "safetensors":
        assert run_program("checkpoint.to_safetensors", model, tmp_path / "converted").returncode == 0
        model = tmp_path / "converted"
        (model / "quantmill.json").unlink()
        (model / "config.json").unlink()
    config = json.loads((REPO / "demo/config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | NAMED))
    for name in ("quantize_config.json", "quant_config.json", "adapter_config.json", "model.py"):
        (model / name).write_text("{}")
    steps = [
        ("fetch.link", model, tmp_path / "source"),
        ("checkpoint.to_safetensors", tmp_path / "source", tmp_path / "safetensors"),
        ("build.fp16", tmp_path / "safetensors", tmp_path / "fp16"),
    ]
    for program, *folders in steps:
        result = run_program(program, *folders)
        assert result.returncode == 0, result.stderr
    for name in ("safetensors", "fp16"):
        folder = tmp_path / name
        assert not NAMED.keys() & json.loads((folder / "config.json").read_text()).keys()
        others = {"quantize_config.json", "quant_config.json", "adapter_config.json", "model.py"}
        assert not {path.name for path in folder.iterdir()} & others
    assert json.loads((tmp_path / "safetensors/config.json").read_text()) == config
