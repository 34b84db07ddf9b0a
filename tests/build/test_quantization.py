"""GPTQ and AWQ: what they calibrate on, which layers they take, and that the kernels calculate what is stored."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import AUTOGPTQ, CALIBRATION, REPO, interpreter
from hypothesis import given
from hypothesis import strategies as st
from recorded_rows import jobs_of

from quantmill.build.quantizer import calibration, linear_layers
from quantmill.build.quantizer.calibration import SHARED, shared_passage
from quantmill.checkpoint import model_shape
from quantmill.checkpoint.tensor import Tensor, row_major
from quantmill.common.program import UserError
from quantmill.plan.resources import CUDA_BUILD

# format -> what its kernel is called on a CPU
FORMATS = {"gptq-int4": "TorchFused", "awq-int4": "TorchFused"} | dict.fromkeys(AUTOGPTQ, "cuda-old (torch)")
NAMES = ["gptq-int4", "awq-int4", *(pytest.param(name, marks=pytest.mark.slow) for name in AUTOGPTQ)]
on_python_3_11 = pytest.mark.skipif(not AUTOGPTQ, reason="envs/autogptq needs Python 3.11")
GPTQ = {"bits": 4, "group_size": "auto", "sym": True, "desc_act": False, "damp_percent": 0.05}


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


def test_samples_are_ordered_windows_fixed_by_the_seed(tmp_path: Path) -> None:
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


def test_missing_layers_and_wrong_group_sizes_are_refused() -> None:
    tower = {"vision_tower.layers.0.fc2.weight": Tensor("x", "F16", (8, 4304), row_major((8, 4304)), Path(), 0)}
    fits = shapes(up_proj=256)
    assert linear_layers.linear_layers(fits | tower) == linear_layers.linear_layers(fits)  # no tool takes it
    with pytest.raises(UserError, match="has no layers to quantize"):
        linear_layers.group_size("auto", {}, Path("m"))
    for asked in ("0", "abc", "-64"):
        with pytest.raises(UserError, match=f"group_size {asked}: a number of weights"):
            linear_layers.group_size(asked, linear_layers.linear_layers(fits), Path("m"))


def test_group_sizes() -> None:
    fits = linear_layers.linear_layers(shapes(up_proj=256, down_proj=640))
    assert fits == {"model.layers.0.mlp.up_proj": (8, 256), "model.layers.0.mlp.down_proj": (8, 640)}
    assert linear_layers.group_size("128", fits, Path("m")) == linear_layers.group_size("auto", fits, Path("m")) == 128
    half = linear_layers.linear_layers(shapes(up_proj=256, down_proj=704))
    assert linear_layers.group_size("auto", half, Path("m")) == 64
    message = (
        r"m: group_size 128 does not divide the inputs of 1 of 2 layers \(model\.layers\.0\.mlp\.down_proj \(704\)\); "
    )
    with pytest.raises(UserError, match=message + "sizes that fit: 64, 32"):
        linear_layers.group_size("128", half, Path("m"))
    with pytest.raises(UserError, match="sizes that fit: none of 128, 64, 32"):
        linear_layers.group_size("auto", linear_layers.linear_layers(shapes(up_proj=100)), Path("m"))


@pytest.fixture(scope="module")
def facts(demo: Path, legacy: list[str], call: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run tests/build/quantization_checks.py on the demo's artifacts."""
    artifacts = tmp_path_factory.mktemp("quantized") / "demo"
    shutil.copytree(demo / "artifacts/demo", artifacts)
    found = {}
    for env, names in {"gptqmodel": ["gptq-int4", "awq-int4"], "autogptq": legacy}.items():
        if names:
            result = call(interpreter(env), REPO / "tests/build/quantization_checks.py", artifacts, *names)
            assert result.returncode == 0, result.stderr
            found |= json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_kernels_calculate_what_is_stored(facts: dict[str, Any], name: str) -> None:
    assert facts[name]["layers"] == 7 * 7
    assert facts[name]["unexpected"] == []
    assert facts[name]["error"] < 1e-2  # gptqmodel's multiply in bfloat16
    assert facts[name]["tokens"] == 40
    assert facts[name]["versions"]["kernel"].startswith(FORMATS[name])


@pytest.mark.parametrize("name", [NAMES[0], *NAMES[2:]])
def test_gptq_that_is_not_symmetric_and_reorders_inputs(facts: dict[str, Any], name: str) -> None:
    other = facts[name]["other"]
    assert other["layers"] == 7 * 7
    assert other["unexpected"] == []
    assert other["error"] < 1e-2
    assert other["versions"]["kernel"] != facts[name]["versions"]["kernel"]


@pytest.mark.parametrize("name", ["gptq-int4", "awq-int4"])
def test_one_position_reads_the_weights_that_are_stored(facts: dict[str, Any], name: str) -> None:
    """In the layout of AWQ's GEMV kernel, which takes 8 or 16 groups of zero points and scales at a time."""
    found = facts[name]["one_position"]
    assert found["unknown"] == [0, 0]
    assert found["wrapped"] == len(found["errors"]) == 7 * 4
    assert max(found["errors"]) < 1e-4
    assert found["calls"] == [[1, 256]] * 7 * 4
    assert found["flat"] == [1, 2 * 256]
    assert found["left"]
    assert found["group_64"] < 1e-6
    assert found["rows_64"] == [2, 16]


@pytest.mark.slow
@on_python_3_11
def test_the_same_input_gives_auto_gptq_the_same_bytes(facts: dict[str, Any]) -> None:
    """By one thread and by two. So do the other tools: test_interrupted_builds.py."""
    assert facts["autogptq-int4"]["same_bytes"]


@pytest.mark.parametrize("name", NAMES)
def test_four_bits_cost_little(demo: Path, name: str) -> None:
    """Within 2% of float16: rounding to nearest costs 1.2 to 1.8%, and AWQ on a CPU cost 5.6% before it was mended."""
    ours, reference = (
        json.loads((demo / f"artifacts/demo/quality/{each}.json").read_text())["summary"]["perplexity"]
        for each in (name, "fp16")
    )
    assert 1.0 < ours / reference < 1.02
    manifest = json.loads((demo / f"artifacts/demo/{name}/quantmill.json").read_text())
    text = json.loads((demo / "artifacts/demo/tokens/calibration.json").read_text())
    assert manifest["calibration_sha256"] == text["text_sha256"]


@pytest.mark.slow
@on_python_3_11
@pytest.mark.parametrize(("name", "engine"), [("gptq-int4", "autogptq"), ("autogptq-int4", "gptqmodel")])
def test_each_gptq_tool_loads_what_the_other_wrote(
    demo: Path, call: Callable, tmp_path: Path, name: str, engine: str
) -> None:
    """The folder as it is, with the quality that its own tool's engine has."""
    artifacts = demo / "artifacts/demo"
    options = ("--engine", engine, "--evaluation", artifacts / "tokens/evaluation.json")
    options += ("--reference", artifacts / "quality/fp16-predictions", "--expected", artifacts / "expected.json")
    out = tmp_path / "quality.json"
    result = call(interpreter(engine), "scripts/quantmill", "quality.measure", artifacts / name, out, *options)
    assert result.returncode == 0, result.stderr
    own, theirs = (json.loads(path.read_text()) for path in (artifacts / f"quality/{name}.json", out))
    assert own["engine"] != theirs["engine"]
    assert theirs["total_nll"] == pytest.approx(own["total_nll"], rel=1e-3)
    assert own["summary"]["perplexity_low"] < theirs["summary"]["perplexity"] < own["summary"]["perplexity_high"]


@pytest.mark.slow
@on_python_3_11
def test_zero_points_do_not_spill_into_their_neighbours(facts: dict[str, Any]) -> None:
    theirs, ours = facts["spilled"]["theirs"], facts["spilled"]["ours"]
    assert min(theirs["cuda-old"], theirs["cuda"]) > 0.1
    assert max(ours["cuda-old"], ours["cuda"]) < 1e-6
    assert ours["steps"] < 0.501  # still to the nearest of its sixteen values


@pytest.mark.slow
@on_python_3_11
def test_an_artifact_that_lacks_a_weight_is_refused(demo: Path, call: Callable, tmp_path: Path) -> None:
    """auto-gptq itself says nothing, and leaves the weight as chance had it."""
    artifacts = demo / "artifacts/demo"
    broken = tmp_path / "broken"
    shutil.copytree(artifacts / "autogptq-int4", broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").write_bytes(data.replace(b'"model.norm.weight"', b'"model.norm.wrong_"', 1))
    options = ("--engine", "autogptq", "--evaluation", artifacts / "tokens/evaluation.json")
    options += ("--reference", artifacts / "expected.json")
    result = call(interpreter("autogptq"), "scripts/quantmill", "gate.check", broken, tmp_path / "gate.json", *options)
    assert result.returncode == 1
    assert "lacks model.norm.weight, which would be random" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["gptq-int4", "awq-int4"])
def test_a_job_requests_the_memory_it_takes(demo: Path, name: str) -> None:
    artifacts = demo / "artifacts/demo"
    took = json.loads((artifacts / name / "quantmill.json").read_text())["peak_memory_bytes"] / 2**20
    tokens = CALIBRATION["samples"] * CALIBRATION["sequence_length"]
    asked = jobs_of("cpu").formats[name].cpu.mb(model_shape.of_folder(artifacts / "fp16"), tokens)
    if not cuda_build():
        asked -= CUDA_BUILD
    assert took < asked < 2 * took


def cuda_build() -> bool:
    """Return whether the torch that quantized is the CUDA build, for whose memory jobs ask."""
    program = "import torch; print(torch.version.cuda is not None)"
    return subprocess.check_output([interpreter("gptqmodel"), "-c", program], text=True) == "True\n"


def test_an_unfit_group_size_is_one_line(demo: Path, call: Callable, tmp_path: Path) -> None:
    python = interpreter("gptqmodel")
    artifacts = demo / "artifacts/demo"
    texts = [f"--{kind}={artifacts / f'tokens/{kind}.json'}" for kind in ("calibration", "evaluation")]
    options = ["--parameters", json.dumps(GPTQ | {"group_size": 96}), "--samples=4", "--sequence-length=512"]
    result = call(python, "scripts/quantmill", "build.gptq", artifacts / "fp16", tmp_path / "out", *texts, *options)
    assert result.returncode == 1
    assert "group_size 96 does not divide the inputs of" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_the_gate_s_findings_are_in_the_manifest(facts: dict[str, Any]) -> None:
    """Perplexity by the kernels, and how far they are from transformers with the same weights, unpacked."""
    assert {"gptq-int4", "awq-int4"} <= facts.keys()
    for name in FORMATS.keys() & facts.keys():
        gate = facts[name]["gate"]
        assert gate["perplexity"] < 1.05 * gate["reference"]
        assert gate["faithful"]["against"] == "its own weights"
        assert gate["faithful"]["divergence"] < 1e-3


def test_a_broken_conversion_is_refused(demo: Path, call: Callable, tmp_path: Path, torch_python: Path) -> None:
    artifacts = demo / "artifacts/demo"
    broken = tmp_path / "broken"
    shutil.copytree(artifacts / "safetensors", broken)
    shard = sorted(broken.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-200_000:] = bytes(200_000)
    shard.unlink()
    shard.write_bytes(data)
    record = json.loads((broken / "quantmill.json").read_text())
    del record["files"][shard.name]  # as if it had been made so
    (broken / "quantmill.json").write_text(json.dumps(record))
    gate = ("--gate-reference", artifacts / "expected.json", "--gate-evaluation", artifacts / "tokens/evaluation.json")
    program = (torch_python, "scripts/quantmill", "build.ct2", broken, tmp_path / "out", *gate)
    for quantization, reason in (("float32", "does not calculate what the weights say"), ("int8", "its perplexity is")):
        options = ["--engine", "ctranslate2", "--layout", "ct2"]
        options += ["--parameters", json.dumps({"quantization": quantization})]
        result = call(*program, *options, "--gate-factor", "1.01")
        assert result.returncode == 1
        assert "out: refused by the quality gate: " in result.stderr.splitlines()[-1]
        assert reason in result.stderr.splitlines()[-1]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


@pytest.mark.slow
def test_gptq_goes_on_after_it_was_killed(demo: Path, call: Callable, tmp_path: Path) -> None:
    """Finished layers are not repeated, and the bytes are those of an undisturbed job, for any number of threads."""
    artifacts, out = demo / "artifacts/demo", tmp_path / "out"
    command = [interpreter("gptqmodel"), REPO / "scripts/quantmill", "build.gptq", artifacts / "fp16", out]
    command += [f"--{key.replace('_', '-')}={value}" for key, value in CALIBRATION.items()]
    command += ["--parameters", json.dumps(GPTQ)]
    for kind in ("calibration", "evaluation"):
        command += [f"--{kind}", artifacts / f"tokens/{kind}.json"]
    first = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while first.poll() is None and not list(tmp_path.glob(".out.resume-*/CURRENT")):  # a layer is safe
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert not out.exists()
    second = call(*command, OMP_NUM_THREADS="1")
    assert second.returncode == 0, second.stderr
    printed = second.stdout + second.stderr
    assert "Quantizing layer 6 of 6" in printed
    assert "Quantizing layer 0 of 6" not in printed
    built = [json.loads((each / "quantmill.json").read_text())["files"] for each in (artifacts / "gptq-int4", out)]
    assert built[0] == built[1]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
