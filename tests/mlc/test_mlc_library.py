"""The model library and its engine, against transformers on the same weights."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_models
from conftest import REPO, interpreter

HERE = Path(__file__).parent
LOAD = """
import sys
from pathlib import Path
sys.path.insert(0, 'scripts')
from quantmill import engines
from quantmill.devices import cpu
from quantmill.common.program import run
run(lambda: engines.load('quantmill-tvm', Path(sys.argv[1]), 'cpu', 1))
"""


@pytest.fixture(scope="session")
def mlc_python() -> Path:
    """Return the interpreter of envs/mlc."""
    return interpreter("mlc")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of compiled libraries that all tests share."""
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture
def build(mlc_python: Path, call: Callable, cache: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write a small model and compile its library."""

    def run(config: dict[str, Any], name: str = "artifact", seed: int = 0) -> Path:
        artifact = small_models.write(tmp_path / name, config, seed)
        out = artifact / "model_lib.so"
        options = (artifact, out, "--device", "cpu", "--cache", cache)
        result = call(mlc_python, "scripts/quantmill", "mlc.compile", *options)
        assert result.returncode == 0, result.stderr
        return artifact

    return run


@pytest.fixture
def run_both(mlc_python: Path, torch_python: Path, call: Callable, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return the engine's facts, and the distance of its logits and tokens from transformers'."""

    def run(
        artifact: Path,
        *options: object,
        ids: list[int] | None = None,
        config: Path | None = None,
        new_tokens: int = 200,
    ) -> dict[str, Any]:
        random = np.random.default_rng(0).integers(2, 300, 75).tolist()
        (tmp_path / "ids.json").write_text(json.dumps(ids or random))
        out = tmp_path / "facts.npz"
        ran = call(mlc_python, HERE / "engine_run.py", artifact, tmp_path / "ids.json", 11, new_tokens, out, *options)
        assert ran.returncode == 0, ran.stderr
        compared = call(torch_python, HERE / "transformers_checks.py", artifact, config or artifact, out)
        assert compared.returncode == 0, compared.stderr
        return json.loads(ran.stdout.splitlines()[-1]) | json.loads(compared.stdout.splitlines()[-1])

    return run


def bytes_per_token(config: dict[str, Any]) -> float:
    """4.5 bits a weight, the head's rows filled up to 320; of an untied table nothing."""
    shapes = small_models.shapes(config)
    if not config["tie_word_embeddings"]:
        del shapes["model.embed_tokens"]
    rows = [(320 if shape[0] == 300 else shape[0], *shape[1:]) for shape in shapes.values()]
    return sum(np.prod(shape) * (2 if len(shape) == 1 else 4.5 / 8) for shape in rows)


@pytest.mark.parametrize("name", small_models.MODELS)
def test_the_library_calculates_what_transformers_does(name: str, build: Callable, run_both: Callable) -> None:
    facts = run_both(build(small_models.MODELS[name]))
    assert facts["again"], "the engine's logits or tokens are others when it runs again"
    # MKL adds in an order that depends on where its buffers lie: the last bits of float64 may differ
    assert facts["reference_again"] < 1e-12, "transformers' logits are others when it runs again"
    assert facts["error"] < 1e-5, facts
    assert facts["positions"] == 75
    assert facts["chunks"] == [16, 16, 16, 16, 11]
    assert facts["tokens"] == 200
    assert all(margin < 1e-4 for margin in facts["wrong_margins"])
    assert (facts["compute_type"], facts["dtype"]) == ("float32", "float32")
    assert facts["versions"]["apache-tvm"] == "0.27.0.post1"
    assert facts["weight_bytes"] == bytes_per_token(small_models.MODELS[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("llama3", []), ("qwen2", ["--warpgroups"])])
def test_the_gpus_model_calculates_the_same(name: str, options: list[str], build: Callable, run_both: Callable) -> None:
    """Its kernels' sources, run thread by thread on this processor: many positions at once, one by one, over seams."""
    facts = run_both(build(small_models.MODELS[name]), "--gpu-model", *options, new_tokens=60)
    assert facts["error"] < 1e-2
    assert facts["positions"] == 75
    assert all(margin < 1e-2 for margin in facts["wrong_margins"])


def test_attention_of_one_position(mlc_python: Path, call: Callable, tmp_path: Path) -> None:
    """The kernel's sources, with one block for a head, with several, and with several heads for one key."""
    result = call(mlc_python, HERE / "attention_checks.py", tmp_path)
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout.splitlines()[-1])
    assert len(results) == 6
    assert all(error < 2e-3 and counters == 0 for error, counters in results)


def test_products_of_many_positions(mlc_python: Path, call: Callable, tmp_path: Path) -> None:
    """The kernel's sources for every size of block, in both ways, at seams of rows, positions and inputs."""
    result = call(mlc_python, HERE / "products_checks.py", tmp_path)
    assert result.returncode == 0, result.stderr
    errors = json.loads(result.stdout.splitlines()[-1])
    assert len(errors) == 25
    assert max(errors.values()) < 1e-2, errors


def test_threads_change_nothing(build: Callable, run_both: Callable) -> None:
    facts = run_both(build(small_models.LLAMA), "--threads", 3)
    assert facts["again"]
    assert facts["error"] < 1e-5
    assert all(margin < 1e-4 for margin in facts["wrong_margins"])


def test_end_of_sequence_is_never_chosen(build: Callable, run_both: Callable, tmp_path: Path) -> None:
    artifact = build(small_models.LLAMA)
    run_both(artifact)
    first, *rest = np.load(tmp_path / "facts.npz")["tokens"].tolist()
    stop = [first, next(token for token in rest if token != first)]
    for config in (artifact / "config.json", artifact / "mlc-chat-config.json"):  # transformers' and the engine's
        config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": stop}))
    facts = run_both(artifact)
    assert facts["chose_stop"] == []
    assert all(margin < 1e-4 for margin in facts["wrong_margins"])


def test_the_demo_is_decoded_as_by_transformers(
    mlc_python: Path, tools_python: Path, call: Callable, run_both: Callable, tmp_path: Path
) -> None:
    source, artifact = tmp_path / "safetensors", tmp_path / "mlc"
    options = ["--library", tmp_path / "model_lib.so", '--parameters={"quantization": "q4f16_1"}']
    for command in (
        (tools_python, "scripts/quantmill", "fetch.link", "demo", tmp_path / "source", "--kind", "demo"),
        (tools_python, "scripts/quantmill", "checkpoint.to_safetensors", tmp_path / "source", source),
        (mlc_python, "scripts/quantmill", "mlc.compile", source, tmp_path / "model_lib.so", "--device", "cpu"),
        (mlc_python, "scripts/quantmill", "build.mlc", source, artifact, *options),
    ):
        result = call(*command)
        assert result.returncode == 0, result.stderr
    ids = np.random.default_rng(0).integers(2, 2048, 300).tolist()
    facts = run_both(artifact, ids=ids, config=source)
    assert facts["error"] < 1e-5
    assert facts["tokens"] == 200
    assert all(margin < 1e-4 for margin in facts["wrong_margins"])


def test_a_library_is_compiled_once_for_all_weights(build: Callable, cache: Path) -> None:
    config = small_models.LLAMA | {"intermediate_size": 96}
    before = set(cache.iterdir())
    first = build(config, "first", seed=1)
    (added,) = set(cache.iterdir()) - before
    written = added.stat().st_mtime_ns
    second = build(config | {"max_position_embeddings": 64}, "second", seed=2)
    assert set(cache.iterdir()) - before == {added}
    assert added.stat().st_mtime_ns == written
    assert (first / "model_lib.so").read_bytes() == (second / "model_lib.so").read_bytes()
    build(config | {"rope_theta": 500.0}, "third")
    assert len(set(cache.iterdir()) - before) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not modelled for MLC, only Llama"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling of type 'yarn' is not modelled for MLC"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not modelled for MLC's llama"),
        ({"hidden_size": 100}, "hidden_size is 100, and the model library needs a multiple of 32"),
        ({"num_key_value_heads": 3}, "hidden_size 128 and 3 of 4 heads do not divide evenly"),
        ({"vocab_size": None}, "vocab_size is None, not a size"),
    ],
)
def test_other_architectures_are_refused_by_name(
    change: dict[str, Any], message: str, mlc_python: Path, call: Callable, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small_models.LLAMA | change))
    result = call(mlc_python, "scripts/quantmill", "mlc.compile", config, tmp_path / "out.so", "--device", "cpu")
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out.so").exists()


def test_without_a_compiler_it_says_so(mlc_python: Path, call: Callable, tmp_path: Path) -> None:
    artifact = small_models.write(tmp_path / "artifact", small_models.LLAMA)
    options = (artifact, tmp_path / "out.so", "--device", "cpu")
    result = call(mlc_python, "scripts/quantmill", "mlc.compile", *options, PATH=str(tmp_path), CXX="")
    assert result.returncode == 1
    assert "needs a C++ compiler" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out.so").exists()


def engine_error(mlc_python: Path, artifact: Path, last: str = LOAD) -> str:
    """Return the one line in which the engine refuses an artifact."""
    command = [mlc_python, "-c", last, artifact]
    result = subprocess.run(list(map(str, command)), cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    return line


def test_what_does_not_belong_together_is_refused(build: Callable, mlc_python: Path, tmp_path: Path) -> None:
    artifact = build(small_models.LLAMA)
    elsewhere = LOAD.replace("\nrun(", "\ncpu.features = lambda: []\nrun(")
    assert "which this one lacks; build it again here" in engine_error(mlc_python, artifact, elsewhere)
    other = build(small_models.LLAMA | {"num_hidden_layers": 1}, "other")
    (artifact / "model_lib.so").unlink()  # a link into the cache
    shutil.copy(other / "model_lib.so", artifact)
    assert "was compiled for another architecture; build it again" in engine_error(mlc_python, artifact)
    content = json.loads((other / "tensor-cache.json").read_text())
    records = content["records"][0]["records"]
    (other / "tensor-cache.json").write_text(
        json.dumps({"records": [content["records"][0] | {"records": records[1:]}]})
    )
    assert "lacks model.embed_tokens.q_weight" in engine_error(mlc_python, other)
    records[-1]["nbytes"] += 64
    (other / "tensor-cache.json").write_text(json.dumps(content))
    assert "params_shard_0.bin: is too short for" in engine_error(mlc_python, other)
    (other / "model_lib.so").unlink()
    (other / "model_lib.so").write_bytes(b"\x7fELF")
    assert "model_lib.so: TVM cannot load it" in engine_error(mlc_python, other)


def test_a_library_for_a_gpu_that_is_not_here(mlc_python: Path, call: Callable, tmp_path: Path) -> None:
    """Everything up to the CUDA source of each kernel, or where nvcc and a driver are, their binaries."""
    artifact = small_models.write(tmp_path / "artifact", small_models.LLAMA | {"num_hidden_layers": 1})
    out = artifact / "model_lib.so"
    result = call(mlc_python, "scripts/quantmill", "mlc.compile", artifact, out, "--arch", "sm_90")
    assert result.returncode == 0, result.stderr
    assert b"attend_one_kernel" in out.read_bytes()
    assert "build it again" in engine_error(mlc_python, artifact)
