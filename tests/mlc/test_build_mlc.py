"""build_mlc.py beside the weights: the chat config, what is refused, the library, and MLC-LLM in its place."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPO
from models import LLAMA, MISTRAL, QWEN2, random_tensors, write_model

from common.program import UserError
from mlc import chat_config, source_config

GOLDEN = REPO / "tests/data/mlc-q4f16_1"
STAND_IN = REPO / "tests/mlc/stand_in_python.py"
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
WITHOUT_ROPE = {key: value for key, value in LLAMA.items() if key != "rope_theta"}


@pytest.fixture
def program(call: Callable, tools_python: Path, tmp_path: Path) -> Callable:
    """Run build_mlc.py; output in tmp_path/out."""

    def run(source: Path, *options: object, **environment: str) -> Any:
        return call(tools_python, "scripts/build_mlc.py", source, tmp_path / "out", *options, **environment)

    return run


def read(config: dict) -> source_config.SourceConfig:
    return source_config.read(config, Path("m/config.json"))


@pytest.mark.parametrize(
    ("config", "base", "scaling"),
    [
        (WITHOUT_ROPE, 10000, None),
        (LLAMA | {"rope_theta": 500000.0}, 500000.0, None),
        (LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3}, 500000.0, LLAMA3),
        (WITHOUT_ROPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        (WITHOUT_ROPE | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, 5e5, LLAMA3),
        (LLAMA | {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": 1e4}}, 1e4, LLAMA3),
        (LLAMA | {"rope_scaling": {"type": "default"}}, 10000.0, None),
        (MISTRAL | {"rope_theta": 1e6}, 1e6, None),
        (QWEN2 | {"rope_theta": 1e6}, 1e6, None),
    ],
)
def test_rope_in_every_spelling(config: dict, base: float, scaling: dict | None) -> None:
    written = chat_config.model_config(read(config))
    assert written["position_embedding_base"] == base
    assert written["rope_scaling"] == scaling
    if config["model_type"] == "qwen2":
        assert written["rope_theta"] == base


REFUSED = {
    "architecture 'PhiForCausalLM' is not modelled for MLC, only LlamaForCausalLM": {
        "architectures": ["PhiForCausalLM"]
    },
    "architecture 'MixtralForCausalLM'": {"architectures": ["MixtralForCausalLM"]},
    "architecture None": {"architectures": []},
    "attention_bias True is not modelled for MLC's llama": {"attention_bias": True},
    "mlp_bias True": {"mlp_bias": True},
    "layer_types ['full_attention', 'sliding_attention'] are": {"layer_types": ["full_attention", "sliding_attention"]},
    "quantization_config {'quant_method': 'gptq'}": {"quantization_config": {"quant_method": "gptq"}},
    "auto_map": {"auto_map": {"AutoModelForCausalLM": "own.Model"}},
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "rope_scaling of type 'linear'": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_scaling of type 'yarn'": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    "rope_scaling of type llama3 lacks low_freq_factor": {
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"}
    },
    "rope_parameters differ from rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
    "hidden_size is None, not a size": {"hidden_size": None},
    "num_hidden_layers is 1.5": {"num_hidden_layers": 1.5},
    "do not divide evenly": {"num_key_value_heads": 3},
    "rms_norm_eps is 'x', not a number": {"rms_norm_eps": "x"},
    "rope_theta is -1, not a base": {"rope_theta": -1},
}


@pytest.mark.parametrize("message", list(REFUSED))
def test_configs_that_are_not_modelled_are_refused_by_name(message: str) -> None:
    with pytest.raises(UserError) as error:
        read(LLAMA | REFUSED[message])
    assert str(error.value).startswith("m/config.json: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MISTRAL | {"sliding_window": 4096}, "sliding_window 4096 is not modelled for MLC's mistral"),
        (MISTRAL | {"tie_word_embeddings": True}, "MLC's mistral has a head of its own"),
        (MISTRAL | {"rope_scaling": LLAMA3}, "rope_scaling 'llama3' is not modelled for MLC's mistral"),
        (QWEN2 | {"use_sliding_window": True}, "use_sliding_window True"),
        (QWEN2 | {"attention_bias": False}, "attention_bias False is not modelled for MLC's qwen2"),
        (QWEN2 | {"head_dim": 32}, "head_dim 32 times 4 heads is not hidden_size 64"),
    ],
)
def test_what_a_family_of_mlcs_lacks_is_refused(config: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(config)


def test_the_whole_chat_config(tmp_path: Path) -> None:
    """By hand: the keys in MLC-LLM's order, generation_config.json before config.json."""
    config = LLAMA | {"rope_theta": 500000.0, "temperature": 0.9, "eos_token_id": 7, "max_position_embeddings": 10000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": null, "eos_token_id": [8, 9]}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<s>": 2}},
        "added_tokens": [{"id": 2, "content": "<s>"}, {"id": 3, "content": "<pad>"}],
        "decoder": {"type": "ByteLevel"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    chat_config.write(tmp_path, tmp_path, read(config), "q4f16_1")
    text = (tmp_path / "mlc-chat-config.json").read_text()
    content = json.loads(text)
    assert text == json.dumps(content, indent=2)
    conversation = content.pop("conv_template")
    assert (conversation["name"], conversation["stop_token_ids"]) == ("LM", [8, 9])
    assert list(content.items()) == [
        ("version", "0.1.0"),
        ("model_type", "llama"),
        ("quantization", "q4f16_1"),
        (
            "model_config",
            {
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "rms_norm_eps": 1e-5,
                "vocab_size": 50,
                "tie_word_embeddings": False,
                "position_embedding_base": 500000.0,
                "rope_scaling": None,
                "context_window_size": 10000,
                "prefill_chunk_size": 8192,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "tensor_parallel_shards": 1,
                "pipeline_parallel_stages": 1,
                "max_batch_size": 128,
                "disaggregation": False,
            },
        ),
        ("vocab_size", 50),
        ("context_window_size", 10000),
        ("sliding_window_size", -1),
        ("prefill_chunk_size", 8192),
        ("attention_sink_size", -1),
        ("tensor_parallel_shards", 1),
        ("pipeline_parallel_stages", 1),
        ("active_vocab_size", 4),
        ("temperature", 0.6),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("top_p", 1.0),
        ("tokenizer_files", ["tokenizer.json", "tokenizer_config.json"]),
        (
            "tokenizer_info",
            {
                "token_postproc_method": "byte_level",
                "prepend_space_in_encode": False,
                "strip_space_in_decode": False,
            },
        ),
        ("pad_token_id", 0),
        ("bos_token_id", 1),
        ("eos_token_id", [8, 9]),
        ("model_task", "chat"),
        ("embedding_metadata", None),
    ]


STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
LLAMA2 = {
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace"}]},
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, STRIP]},
}


@pytest.mark.parametrize(
    ("tokenizer", "found"),
    [
        (LLAMA2, ("byte_fallback", True, True)),
        ({"decoder": {"type": "ByteLevel"}, "normalizer": {"type": "NFC"}}, ("byte_level", False, False)),
        ({"normalizer": {"type": "Prepend", "prepend": "▁"}, "decoder": STRIP}, ("byte_fallback", True, True)),
        ({"normalizer": {"type": "Prepend", "prepend": "_"}, "decoder": STRIP | {"stop": 1}}, ("byte_fallback", 0, 0)),
        ({"decoder": None, "normalizer": None}, ("byte_fallback", False, False)),
        ({"decoder": {"type": "Sequence", "decoders": 3}}, ("byte_fallback", False, False)),
        ({}, ("byte_fallback", False, False)),
    ],
)
def test_tokenizer_info(tokenizer: dict, found: tuple) -> None:
    assert tuple(chat_config.tokenizer_info(tokenizer).values()) == found


def test_vocabulary_of_a_unigram_tokenizer() -> None:
    model = {"vocab": [["a", 0.0], ["b", -1.0]]}
    assert chat_config.vocabulary_size({"model": model, "added_tokens": [{"content": "c"}]}) == 3
    assert chat_config.vocabulary_size({}) == 0


def refusal(result: Any, tmp_path: Path) -> str:
    """The one line of a run that failed and left nothing."""
    assert result.returncode == 1, result.stdout
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
            (tensors, "I32", "is I32, which is no plain weight"),
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
    assert "where its header tells of" in refusal(program(source, "--weights-only"), tmp_path)


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
    assert "none.so: no such file; compile_mlc.py writes a model library" in line


def test_a_library_becomes_part_of_the_artifact(program: Callable, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"library")
    result = program(golden(tmp_path), "--library", tmp_path / "lib.so")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/model_lib.so").samefile(tmp_path / "lib.so")
    manifest = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert (manifest["engine"], manifest["gate"]) == ("mlc", None)
    assert manifest["source"] == {"kind": "test"}
    assert "model_lib.so" in manifest["files"]
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_a_library_that_does_not_run_is_refused_by_the_gate(program: Callable, tmp_path: Path) -> None:
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


def test_mlc_llm_compiles_for_its_own_engine_beside_a_library(program: Callable, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"library")
    options = ("--library", tmp_path / "lib.so", "--tool", "mlc_llm", "--mlc-llm-python", STAND_IN, "--device", "cpu")
    result = program(golden(tmp_path), *options)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/mlc_llm.so").read_text() == "compiled"
    assert (tmp_path / "out/model_lib.so").read_bytes() == b"library"


def test_auto_without_a_working_mlc_llm_writes_the_same_bytes(program: Callable, tmp_path: Path) -> None:
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
        ("placeholder", STAND_IN, "`mlc_llm convert_weight --help` tells of no --quantization"),
        ("", "/nowhere/python", "no working mlc_llm: it does not run"),
        ("", None, "--mlc-llm-python names no interpreter"),
        ("failing", STAND_IN, "convert_weight` failed: RuntimeError: no room; --tool builtin does without it"),
    ],
)
def test_mlc_llm_that_is_asked_for_and_does_not_work(
    program: Callable, tmp_path: Path, kind: str, python: Path | None, message: str
) -> None:
    named = ("--mlc-llm-python", python) if python else ()
    result = program(golden(tmp_path), "--weights-only", "--tool", "mlc_llm", *named, STAND_IN=kind)
    assert message in refusal(result, tmp_path)


def test_builtin_asks_nobody(program: Callable, tmp_path: Path) -> None:
    result = program(golden(tmp_path), "--weights-only", "--tool", "builtin", "--mlc-llm-python", "/nowhere/python")
    assert result.returncode == 0, result.stderr
