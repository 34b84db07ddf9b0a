"""GPTQ and AWQ: what they calibrate on, which layers they take, and that the kernels calculate what is stored."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPO
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.tensor import Tensor, row_major
from common.program import UserError
from quantization import calibration, layers
from quantization.calibration import SHARED, shared_passage


@given(st.integers(0, 2**32), st.integers(0, 300), st.integers(0, 200), st.integers(0, 2 * SHARED))
def test_a_shared_passage_is_found_where_it_begins(seed: int, before: int, elsewhere: int, length: int) -> None:
    random = np.random.default_rng(seed)
    passage = random.integers(0, 1000, length).tolist()
    ids = [*random.integers(1000, 2000, before).tolist(), *passage, *random.integers(1000, 2000, 50).tolist()]
    others = [*random.integers(2000, 3000, elsewhere).tolist(), *passage, *random.integers(2000, 3000, 50).tolist()]
    assert shared_passage(ids, others) == (before if length >= SHARED else None)


def tokens(path: Path, ids: list[int], context: int = 64) -> Path:
    path.write_text(json.dumps({"ids": ids, "context": context, "text_sha256": path.name}))
    return path


def test_samples_are_windows_in_order_and_the_same_for_a_seed(tmp_path: Path) -> None:
    text, evaluation = tokens(tmp_path / "c", list(range(1000))), tokens(tmp_path / "e", list(range(5000, 5100)))
    first = calibration.read(text, evaluation, samples=4, sequence_length=2048, seed=1)
    assert first == calibration.read(text, evaluation, samples=4, sequence_length=2048, seed=1)
    assert (len(first.samples), first.sequence_length, first.sha256) == (4, 64, "c")
    starts = [sample[0] for sample in first.samples]
    assert starts == sorted(set(starts))
    assert all(sample == list(range(sample[0], sample[0] + 64)) for sample in first.samples)
    everything = calibration.read(text, evaluation, samples=128, sequence_length=64, seed=1)
    assert len(everything.samples) == 1000 // 64


def test_a_calibration_text_that_is_evaluated_is_refused(tmp_path: Path) -> None:
    text = tokens(tmp_path / "c", list(range(200)))
    with pytest.raises(UserError, match="shares 32 tokens in a row with the evaluation text, from token 100"):
        calibration.read(text, tokens(tmp_path / "e", list(range(100, 140))), samples=1, sequence_length=64, seed=0)
    with pytest.raises(UserError, match="has 200 tokens, fewer than one sample of 256"):
        calibration.read(tokens(tmp_path / "c", list(range(200)), 256), text, samples=1, sequence_length=512, seed=0)


def shapes(**inputs: int) -> dict[str, Tensor]:
    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        return Tensor(name, "F16", shape, row_major(shape), Path(), 0)

    names = {f"model.layers.0.mlp.{name}.weight": (8, width) for name, width in inputs.items()}
    names |= {"model.embed_tokens.weight": (100, 7), "model.layers.0.norm.weight": (7,), "lm_head.weight": (100, 7)}
    return {name: tensor(name, shape) for name, shape in names.items()}


def test_group_sizes() -> None:
    fits = layers.linear_layers(shapes(up_proj=256, down_proj=640))
    assert fits == {"model.layers.0.mlp.up_proj": (8, 256), "model.layers.0.mlp.down_proj": (8, 640)}
    assert layers.group_size("128", fits, Path("m")) == layers.group_size("auto", fits, Path("m")) == 128
    half = layers.linear_layers(shapes(up_proj=256, down_proj=704))
    assert layers.group_size("auto", half, Path("m")) == 64
    message = (
        r"m: group_size 128 does not divide the inputs of 1 of 2 layers \(model\.layers\.0\.mlp\.down_proj \(704\)\); "
    )
    with pytest.raises(UserError, match=message + "sizes that fit: 64, 32"):
        layers.group_size("128", half, Path("m"))
    with pytest.raises(UserError, match="sizes that fit: none of 128, 64, 32"):
        layers.group_size("auto", layers.linear_layers(shapes(up_proj=100)), Path("m"))


@pytest.fixture(scope="module")
def facts(demo: Path) -> dict[str, Any]:
    """What tests/quantized_checks.py found out about the demo's artifacts."""
    python = REPO / "envs/gptqmodel/bin/python"
    if not python.exists():
        pytest.skip("envs/gptqmodel is not built; `make test` builds it")
    command = [python, REPO / "tests/quantized_checks.py", demo / "artifacts/demo"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["gptq-int4", "awq-int4"])
def test_kernels_calculate_what_is_stored(facts: dict[str, Any], name: str) -> None:
    assert facts[name]["layers"] == 7 * 7
    assert facts[name]["unexpected"] == []
    assert facts[name]["error"] < 1e-2  # the kernels multiply in bfloat16
    assert facts[name]["tokens"] == 40
    assert facts[name]["versions"]["kernel"].startswith("TorchFused")


@pytest.mark.parametrize("name", ["gptq-int4", "awq-int4"])
def test_the_same_input_gives_the_same_bytes(facts: dict[str, Any], name: str) -> None:
    assert facts[name]["same_bytes"]


@pytest.mark.parametrize("name", ["gptq-int4", "awq-int4"])
def test_four_bits_cost_little(demo: Path, name: str) -> None:
    """Within 2% of float16: rounding to nearest costs 1.2 to 1.8%, and AWQ on a CPU cost 5.6% before it was mended."""
    results = json.loads((demo / "artifacts/report/results.json").read_text())
    rows = {row["format"]: row for row in results["rows"]}
    assert 1.0 < rows[name]["perplexity"] / rows["fp16"]["perplexity"] < 1.02
    manifest = json.loads((demo / f"artifacts/demo/{name}/quantmill.json").read_text())
    text = json.loads((demo / "artifacts/demo/tokens/calibration.json").read_text())
    assert manifest["calibration_sha256"] == text["text_sha256"]


def test_a_group_size_that_does_not_fit_is_one_line(demo: Path, call: Callable, tmp_path: Path) -> None:
    python = REPO / "envs/gptqmodel/bin/python"
    if not python.exists():
        pytest.skip("envs/gptqmodel is not built; `make test` builds it")
    artifacts = demo / "artifacts/demo"
    texts = (
        "--calibration",
        artifacts / "tokens/calibration.json",
        "--evaluation",
        artifacts / "tokens/evaluation.json",
    )
    result = call(python, "scripts/build_gptq.py", artifacts / "fp16", tmp_path / "out", *texts, "--group-size", "96")
    assert result.returncode == 1
    assert "group_size 96 does not divide the inputs of" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_the_quality_gate(
    demo: Path, call: Callable, tmp_path: Path, torch_python: Path, facts: dict[str, Any]
) -> None:
    """It lets good artifacts pass and says what it found; one that is broken is refused before it has its name."""
    for name in ("gptq-int4", "awq-int4"):
        assert facts[name]["gate"]["perplexity"] < 1.05 * facts[name]["gate"]["reference"]
    artifacts = demo / "artifacts/demo"
    broken = tmp_path / "broken"
    shutil.copytree(artifacts / "safetensors", broken)
    shard = sorted(broken.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-200_000:] = bytes(200_000)
    shard.unlink()
    shard.write_bytes(data)
    gate = (
        "--gate-reference",
        artifacts / "gate.json",
        "--gate-evaluation",
        artifacts / "tokens/evaluation.json",
    )
    program = (torch_python, "scripts/build_ct2.py", broken, tmp_path / "out", "--quantization", "int8")
    result = call(*program, *gate, "--gate-factor", "1.01")
    assert result.returncode == 1
    assert "refused by the quality gate: its perplexity is" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    result = call(*program, *gate, "--gate-factor", "1000")
    assert result.returncode == 0, result.stderr
