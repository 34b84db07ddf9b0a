"""The files of an MLC model, against MLC-LLM's own and against a second writer of them (naive_writer.py)."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import naive_writer
import numpy as np
import pytest
from conftest import REPO, RUN
from hypothesis import example, given, settings
from hypothesis import strategies as st
from in_process import run_program
from models import LLAMA, MISTRAL, QWEN2, random_tensors, write_manifest, write_model, write_sparse

from quantmill.checkpoint import shards
from quantmill.checkpoint.tensor import Tensor, row_major
from quantmill.mlc import parameters, source_config
from quantmill.mlc import shards as mlc_shards
from quantmill.mlc.parameters import Parameter

GOLDEN = REPO / "tests/data/mlc-q4f16_1"

Q4F16_1 = '--parameters={"quantization": "q4f16_1"}'


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Path]:
    """Build the weights of a model; the folder that was written."""

    def run(source: Path, *options: object) -> Path:
        result = run_program("build.mlc", source, tmp_path / "out", "--weights-only", Q4F16_1, *options)
        assert result.returncode == 0, result.stderr
        return tmp_path / "out"

    return run


def golden(tmp_path: Path) -> Path:
    """MLC-LLM's checkpoint, as an artifact of ours."""
    shutil.copytree(GOLDEN / "checkpoint", tmp_path / "golden")
    write_manifest(tmp_path / "golden")
    return tmp_path / "golden"


@pytest.mark.parametrize("indexed", [True, False])
def test_the_bytes_are_mlc_llms_own(build: Callable, tmp_path: Path, indexed: bool) -> None:
    source = golden(tmp_path)
    if not indexed:
        (source / "model.safetensors.index.json").unlink()
    out = build(source)
    for expected in (GOLDEN / "expected").iterdir():
        assert (out / expected.name).read_bytes() == expected.read_bytes(), expected.name
    assert not (set(out.glob("params*")) - {out / path.name for path in (GOLDEN / "expected").iterdir()})


def check(out: Path, expected: dict[str, bytes]) -> None:
    """Every file that another writer expects is there, with its bytes, and no other weights are."""
    written = {path.name for path in out.iterdir() if path.name.startswith(("params_shard", "tensor-cache"))}
    assert written == set(expected)
    for name, data in expected.items():
        assert (out / name).read_bytes() == data, name


CASES = {
    "llama float32": (LLAMA, "F32"),
    "llama bfloat16": (LLAMA, "BF16"),
    "llama tied": (LLAMA | {"tie_word_embeddings": True}, "F16"),
    "groups that are not full": (LLAMA | {"hidden_size": 72, "intermediate_size": 33, "head_dim": 10}, "F16"),
    "heads wider than the model": (LLAMA | {"head_dim": 48}, "BF16"),
    "mistral": (MISTRAL, "BF16"),
    "qwen2, biases, tied": (QWEN2, "BF16"),
    "qwen2 untied": (QWEN2 | {"tie_word_embeddings": False}, "F16"),
}


@pytest.mark.parametrize("quantization", list(parameters.LAYOUTS))
@pytest.mark.parametrize("case", list(CASES))
def test_shapes_dtypes_and_families(build: Callable, tmp_path: Path, case: str, quantization: str) -> None:
    config, dtype = CASES[case]
    tensors = random_tensors(config, dtype)
    source = write_model(tmp_path / "model", config, tensors, dtype)
    out = build(source, f"--parameters={json.dumps({'quantization': quantization})}")
    check(out, naive_writer.write(tensors, config, quantization, [sorted(tensors)]))
    manifest = json.loads((out / "quantmill.json").read_text())
    assert (manifest["format"], manifest["engine"], manifest["tool"]) == ("out", None, "quantmill")
    assert manifest["weight_bytes"] == sum(path.stat().st_size for path in out.glob("params*"))


def test_weight_bytes_per_token_leave_untied_embeddings_out(build: Callable, tmp_path: Path) -> None:
    for tied in (True, False):
        config = LLAMA | {"tie_word_embeddings": tied}
        out = build(write_model(tmp_path / str(tied), config, random_tensors(config, "F16")))
        manifest = json.loads((out / "quantmill.json").read_text())
        embeddings = 50 * (64 // 2 + 64 // 32 * 2)  # 50 rows of 64 weights: half a byte each, and a scale for 32
        assert manifest["weight_bytes"] - manifest["weight_bytes_per_token"] == (0 if tied else embeddings)


@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_in_several_files(build: Callable, tmp_path: Path, seed: int) -> None:
    """File by file, fused tensors across files included, which MLC-LLM reads, and counts, more than once."""
    tensors = random_tensors(LLAMA, "F16", seed)
    names = sorted(tensors)
    random.Random(seed).shuffle(names)
    cuts = [names[begin::3] for begin in range(3)]
    source = write_model(tmp_path / "model", LLAMA, tensors, "F16", cuts)
    check(build(source), naive_writer.write(tensors, LLAMA, "q4f16_1", cuts))


def test_tensors_of_half_a_shard_get_their_own(
    build: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's words begin a shard, and the table's do not fit into the rest. All sizes are 64 times smaller."""
    assert mlc_shards.SHARD_BYTES == 32 * 2**20
    for name in ("SHARD_BYTES", "TASK", "BLOCK"):
        monkeypatch.setattr(mlc_shards, name, getattr(mlc_shards, name) // 64)
    config = LLAMA | {"hidden_size": 256, "vocab_size": 2**11, "num_hidden_layers": 1}
    tensors = random_tensors(config, "BF16")
    out = build(write_model(tmp_path / "model", config, tensors, "BF16"))
    expected = naive_writer.write(tensors, config, "q4f16_1", [sorted(tensors)], mlc_shards.SHARD_BYTES)
    check(out, expected)
    first, second = json.loads((out / "tensor-cache.json").read_text())["records"]
    assert [record["name"] for record in first["records"]] == ["model.embed_tokens.q_weight"]
    assert second["records"][0]["name"] == "lm_head.q_weight"


def parameter(number: int, rows: int, inputs: int, quantized: bool) -> Parameter:
    shape = (rows, inputs)
    part = Tensor(f"{number}.weight", "F16", shape, row_major(shape), Path(), 0)
    return Parameter(str(number), "weight", (part,), quantized)


def zeros(found: list[Parameter]) -> naive_writer.Tensors:
    """Return the stored tensors of parameters, all zeros."""
    return {name: np.zeros(shape, dtype) for each in found for name, (shape, dtype) in each.stored().items()}


sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 100), st.booleans()), min_size=1, max_size=30)


@given(sizes)
@example([(32, 16, False)] * 5)  # four of them fill a shard to the byte, which is too many
@example([(64, 16, False)] * 3)  # and so do two of these, each of them half a shard
@settings(deadline=None)
def test_shards_are_cut_as_by_the_other_writer(drawn: list[tuple[int, int, bool]]) -> None:
    found = [parameter(number, *each) for number, each in enumerate(drawn)]
    expected = json.loads(naive_writer.shards(zeros(found), 1, 4096)["tensor-cache.json"])["records"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlc_shards, "SHARD_BYTES", 4096)
        planned = mlc_shards.plan(found)
    assert [[(record.name, record.offset) for record in shard] for shard in planned] == [
        [(record["name"], record["byteOffset"]) for record in shard["records"]] for shard in expected
    ]


REAL = """
import json, sys, tempfile
from tvm.contrib.tvmjs import TensorCacheShardingManager
with tempfile.TemporaryDirectory() as folder:
    manager = TensorCacheShardingManager(folder, 'params_shard', 4096)
    for name, shape, dtype, nbytes in json.load(sys.stdin):
        manager.append_or_update(bytes(nbytes), name, shape, dtype, 'f32-to-bf16')
    print(json.dumps(manager.finish()))
"""


def test_shards_are_tvms_own(tmp_path: Path) -> None:
    """The sharding that MLC-LLM calls, TVM's, on tensors of many sizes."""
    python = REPO / "envs/mlc/bin/python"
    if not python.exists():
        pytest.skip("envs/mlc is not built; `make test` builds it")
    draw = random.Random(0)
    found = [parameter(n, draw.randint(1, 40), draw.randint(1, 100), draw.random() < 0.7) for n in range(300)]
    tensors = zeros(found)
    listed = [(name, value.shape, str(value.dtype), value.nbytes) for name, value in tensors.items()]
    result = subprocess.run([python, "-c", REAL], input=json.dumps(listed), capture_output=True, text=True, check=True)
    expected = json.loads(naive_writer.shards(tensors, 1, 4096)["tensor-cache.json"])["records"]
    assert json.loads(result.stdout.splitlines()[-1]) == expected


def test_memory_does_not_grow_with_the_model(call: Callable, tools_python: Path, tmp_path: Path) -> None:
    """Neither with layers nor with the size of a tensor: 80 MB, 340 MB, and one tensor of 270 MB of float16."""
    wide = LLAMA | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    peaks = {}
    for name, change in {
        "two layers": {"num_hidden_layers": 2},
        "ten": {"num_hidden_layers": 10},
        "many tokens": {"num_hidden_layers": 2, "vocab_size": 2**17, "tie_word_embeddings": True},
    }.items():
        source = write_sparse(tmp_path / name, wide | change)
        command = (tools_python, "-c", RUN, "scripts/quantmill", "build.mlc", source, tmp_path / "out")
        result = call(*command, "--weights-only", Q4F16_1)
        assert result.returncode == 0, result.stderr
        peaks[name] = int(result.stdout.split()[-1])
        shutil.rmtree(tmp_path / "out")
    assert max(peaks.values()) < 200 * 1024  # KiB
    assert max(peaks.values()) - min(peaks.values()) < 30 * 1024


def test_a_fused_parameter_comes_where_its_first_part_is() -> None:
    """By hand: the file of lm_head comes first in the index, and with it all that this file holds."""
    config = source_config.read(LLAMA | {"num_hidden_layers": 1}, Path("config.json"))
    tensors = {}
    for name, shape in naive_writer.shapes(LLAMA | {"num_hidden_layers": 1}).items():
        tensors[name] = Tensor(name, "F16", shape, row_major(shape), Path("b" if "k_proj" in name else "a"), 0)
    names = ["lm_head.weight", "model.layers.0.self_attn.k_proj.weight", *sorted(tensors)]
    weight_map = {name: tensors[name].path.name for name in names}

    class Source(shards.Checkpoint):
        def tensors(self) -> dict[str, Tensor]:
            return tensors

    source = Source(Path(), "safetensors", (), weight_map)
    found = parameters.find(source, config, parameters.LAYOUTS["q4f16_1"])
    assert [f"{each.name}.{each.suffix}" for each in found] == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.norm.weight",
    ]
