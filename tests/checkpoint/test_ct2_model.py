"""CTranslate2's model.bin: every variable's shape, type and count follow from the model's sizes, or one line names it.

Valgrind proves what the engine does with one that is let through: it reads memory that is not the model's.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ct2_model
import numpy as np
import pytest
from conftest import REPO
from ct2_model import CONFIG, Arrays

from quantmill.checkpoint import ctranslate2_model
from quantmill.common.program import UserError

LAYER = "decoder/layer_0"
ATTENTION = f"{LAYER}/self_attention"
TIED = ("decoder/projection/weight", "decoder/embeddings/weight")


def put(name: str, value: Any, dtype: type = np.int32) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({name: np.array(value, dtype)})


def resize(name: str, *shape: int) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({name: np.resize(arrays[name], shape)})


def retype(name: str, dtype: type) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({name: arrays[name].astype(dtype)})


def drop(name: str) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.pop(name)


def add_layer(arrays: Arrays) -> None:
    """Add a second layer, equal to the first except for its number."""
    copies = {name.replace("layer_0", "layer_1"): each for name, each in arrays.items() if "layer_0" in name}
    arrays |= copies


def turn_positions(arrays: Arrays) -> None:
    """Positions by a table, where they were rotated."""
    for name in [name for name in arrays if "rotary" in name]:
        del arrays[name]
    arrays["decoder/position_encodings/encodings"] = np.zeros((256, 63), np.float32)


def judge(folder: Path, content: bytes, config: dict[str, Any] | None = None, tokens: int = 40) -> str:
    """Return what the check says; nothing if the model passes."""
    ct2_model.write(folder, content, tokens)
    try:
        ctranslate2_model.check(folder, CONFIG if config is None else config)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


@pytest.mark.parametrize("int8", [False, True])
def test_a_good_model_passes(tmp_path: Path, int8: bool) -> None:
    arrays = ct2_model.variables(int8=int8)
    assert judge(tmp_path, ct2_model.pack(arrays.items())) == ""
    assert judge(tmp_path, ct2_model.pack(arrays.items()), {}) == ""  # alone, as engines look at it
    tied = {name: each for name, each in arrays.items() if not name.startswith("decoder/projection")}
    assert judge(tmp_path, ct2_model.pack(tied.items(), [TIED])) == ""


WRONG: dict[str, tuple[Callable[[Arrays], object], str]] = {
    "gamma short": (resize(f"{ATTENTION}/layer_norm/gamma", 63), "layer_norm/gamma should be [64] of"),
    "gamma long": (resize("decoder/layer_norm/gamma", 65), "decoder/layer_norm/gamma should be [64]"),
    "gamma a matrix": (resize("decoder/layer_norm/gamma", 1, 64), "is [1, 64] of float32"),
    "gamma integers": (retype("decoder/layer_norm/gamma", np.int32), "is [64] of int32"),
    "beta alone": (put(f"{LAYER}/ffn/layer_norm/beta", [0] * 64, np.float32), "is missing, and other norms have"),
    "beta short": (put(f"{LAYER}/ffn/layer_norm/beta", [0] * 63, np.float32), "ffn/layer_norm/beta should be [64]"),
    "bias short": (put(f"{LAYER}/ffn/linear_0/bias", [0] * 95, np.float32), "ffn/linear_0/bias should be [96]"),
    "bias long": (put("decoder/projection/bias", [0] * 41, np.float32), "decoder/projection/bias should be [40]"),
    "rows": (resize(f"{ATTENTION}/linear_0/weight", 127, 64), "linear_0/weight should be [128, 64]"),
    "columns": (resize(f"{LAYER}/ffn/linear_1/weight", 64, 95), "ffn/linear_1/weight should be [64, 96]"),
    "transposed": (resize(f"{LAYER}/ffn/linear_0_noact/weight", 64, 96), "linear_0_noact/weight should be [96, 64]"),
    "head": (resize("decoder/projection/weight", 39, 64), "decoder/projection/weight should be [40, 64]"),
    "int32 matrix": (retype(f"{LAYER}/ffn/linear_0/weight", np.int32), "and is [96, 64] of int32"),
    "int8 without scales": (retype(f"{LAYER}/ffn/linear_0/weight", np.int8), "ffn/linear_0/weight_scale is missing"),
    "scale of floats": (put(f"{LAYER}/ffn/linear_0/weight_scale", [1] * 3, np.float32), "is unknown to CTranslate2"),
    "packed": (put(f"{LAYER}/ffn/linear_0/weight_packed", [[1]], np.float32), "weight_packed is unknown to"),
    "compensation": (put(f"{LAYER}/ffn/linear_0/weight_compensation", [1]), "weight_compensation is unknown to"),
    "zeros": (put(f"{LAYER}/ffn/linear_0/weight_zero", [1]), "weight_zero is unknown to"),
    "cross attention": (put(f"{LAYER}/attention/linear_0/weight", [[1]], np.float32), "is unknown to"),
    "no matrix": (drop(f"{LAYER}/ffn/linear_1/weight"), "layer_0/ffn/linear_1/weight is missing"),
    "no norm": (drop(f"{LAYER}/ffn/layer_norm/gamma"), "is missing, or another norm of this layer"),
    "no last norm": (drop("decoder/layer_norm/gamma"), "decoder/layer_norm/gamma is missing"),
    "no head": (drop("decoder/projection/weight"), "decoder/projection/weight is missing"),
    "no heads": (drop("decoder/num_heads"), "decoder/num_heads is missing"),
    "no positions": (
        lambda arrays: [arrays.pop(name) for name in list(arrays) if "rotary" in name],
        "decoder/position_encodings/encodings is missing",
    ),
    "positions narrow": (turn_positions, "encodings should be [256, 64] of"),
    "heads 0": (put("decoder/num_heads", 0), "decoder/num_heads is 0, which is not from 1"),
    "heads -1": (put("decoder/num_heads", -1), "decoder/num_heads is -1"),
    "heads a million": (put("decoder/num_heads", 10**6), "heads 1000000, and config.json's num_attention_heads is 4"),
    "heads a float": (put("decoder/num_heads", 4, np.float32), "should be a number of int8, int16, int32"),
    "heads a list": (put("decoder/num_heads", [4, 4]), "and is [2] of int32"),
    "heads of keys 0": (put(f"{ATTENTION}/num_heads_kv", 0), "num_heads_kv is 0"),
    "heads of keys 3": (put(f"{ATTENTION}/num_heads_kv", 3), "num_heads_kv makes the model's heads of keys 3"),
    "heads of keys 8": (put(f"{ATTENTION}/num_heads_kv", 8), "num_heads_kv is 8, which is not from 1 to 4"),
    "head_dim": (put(f"{ATTENTION}/head_dim", 17), "linear_0/weight should be [136, 64]"),
    "head_dim huge": (put(f"{ATTENTION}/head_dim", 2**31 - 1), "linear_0/weight should be"),
    "rotated beyond": (put(f"{ATTENTION}/rotary_dim", 18), "rotary_dim is 18, which is not from 0 to 16"),
    "rotated odd": (put(f"{ATTENTION}/rotary_dim", 7), "rotary_dim is 7, and positions are rotated in pairs"),
    "rotated -2": (put(f"{ATTENTION}/rotary_dim", -2), "rotary_dim is -2"),
    "factors missing": (put(f"{ATTENTION}/rotary_scaling_type", 1), "rotary_scaling_long_factor is missing"),
    "unknown scaling": (put(f"{ATTENTION}/rotary_scaling_type", 9), "rotary_scaling_type is 9"),
    "base NaN": (put(f"{ATTENTION}/rotary_base", float("nan"), np.float32), "rotary_base is nan"),
    "activation": (put("decoder/activation", 7), "decoder/activation is 7, which is not from 0 to 6"),
    "window": (put("decoder/sliding_window", -1), "decoder/sliding_window is -1"),
    "windows": (
        lambda arrays: (put("decoder/sliding_window", 8)(arrays), put(f"{ATTENTION}/sliding_window", 4)(arrays)),
        "self_attention/sliding_window is 4, less than the decoder's 8",
    ),
    "alignment": (put("decoder/alignment_layer", 5), "decoder/alignment_layer is 5, which is not from -1 to 0"),
    "alignment heads": (put("decoder/alignment_heads", -1), "decoder/alignment_heads is -1"),
    "another layer": (add_layer, "makes the model's layers 2, and config.json's num_hidden_layers is 1"),
    "a gap": (
        lambda arrays: arrays.update({f"{LAYER[:-1]}2/ffn/linear_0/bias": np.zeros(96, np.float32)}),
        "decoder/layer_2/ffn/linear_0/bias is unknown to",
    ),
    "not of the decoder": (put("encoder/num_heads", 4), "encoder/num_heads is unknown to"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_variable_that_contradicts_the_sizes_is_named(tmp_path: Path, name: str) -> None:
    change, said = WRONG[name]
    arrays = ct2_model.variables()
    change(arrays)
    assert said in judge(tmp_path, ct2_model.pack(arrays.items()))


def test_scales_are_one_for_each_row(tmp_path: Path) -> None:
    for change, said in (
        (resize(f"{LAYER}/ffn/linear_0/weight_scale", 95), "ffn/linear_0/weight_scale should be [96] of float32"),
        (retype(f"{LAYER}/ffn/linear_0/weight_scale", np.float16), "and is [96] of float16"),
        (drop("decoder/embeddings/weight_scale"), "decoder/embeddings/weight_scale is missing"),
    ):
        arrays = ct2_model.variables(int8=True)
        change(arrays)
        assert said in judge(tmp_path, ct2_model.pack(arrays.items()))


def test_layers_are_alike(tmp_path: Path) -> None:
    """A bias, a norm of queries or positions that one layer alone has would be left out without a word."""
    config = CONFIG | {"num_hidden_layers": 2}
    assert judge(tmp_path, ct2_model.pack(ct2_model.variables(config).items()), config) == ""
    for change, said in (
        (put(f"{LAYER}/ffn/linear_0/bias", [0] * 96, np.float32), "only one of the two has ffn/linear_0/bias"),
        (put(f"{ATTENTION}/k_norm/gamma", [0] * 16, np.float32), "only one of the two has self_attention/k_norm"),
        (drop(f"{ATTENTION}/rotary_dim"), "only one of the two has self_attention/rotary_dim"),
    ):
        arrays = ct2_model.variables(config)
        change(arrays)
        assert said in judge(tmp_path, ct2_model.pack(arrays.items()), config)


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        ([("decoder/projection/weight", "decoder/nothing")], "is an alias of 'decoder/nothing', which is not a"),
        ([("decoder/projection/weight", "x"), ("x", "decoder/embeddings/weight")], "is an alias of 'x', which is not"),
        ([TIED, TIED], "'decoder/projection/weight' occurs twice"),
        ([("decoder/projection/weight", "decoder/layer_norm/gamma")], "projection/weight should be [40, 64]"),
        ([TIED, ("decoder/num_heads", "decoder/embeddings/weight")], "'decoder/num_heads' occurs twice"),
        ([TIED, ("decoder/more", "decoder/layer_norm/gamma")], "decoder/more is unknown to"),
    ],
)
def test_an_alias_has_its_variables_shape(tmp_path: Path, aliases: list[tuple[str, str]], said: str) -> None:
    arrays = ct2_model.variables()
    del arrays["decoder/projection/weight"]
    assert said in judge(tmp_path, ct2_model.pack(arrays.items(), aliases))


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        (("decoder/num_heads", (), 2, b"\4\0"), "'decoder/num_heads' occurs twice"),
        (("decoder/x", (0, 64), 0, b""), "'decoder/x' is empty, [0, 64]"),
        (("decoder/x", (1,), 6, b"\0\0\0\0"), "'decoder/x' is of dtype 6, which CTranslate2 does not have"),
        (("decoder/x", (1,), 255, b""), "'decoder/x' is of dtype 255"),
        (("decoder/x", (1,), 0, b"\0\0\0\0", 2**31), "'decoder/x' has 2147483648 bytes for [1] of float32"),
        (("decoder/x", (2**31,), 1, b"", 2**31), "cut off, or not a CTranslate2 model"),
        (("decoder/x", (2**32 - 1,) * 255, 0, b"", 0), "'decoder/x' has 0 bytes for"),
    ],
)
def test_a_wrong_header_is_named(tmp_path: Path, variable: tuple, said: str) -> None:
    content = ct2_model.pack(ct2_model.variables().items(), [], ct2_model.variable(*variable))
    assert said in judge(tmp_path, content)


def test_the_file_s_ends_and_its_companions(tmp_path: Path) -> None:
    content = ct2_model.pack(ct2_model.variables().items())
    assert "goes on for 1 bytes after its end" in judge(tmp_path, content + b"x")
    assert "cut off" in judge(tmp_path, content[:-2])
    assert "claims 4294967295 aliases" in judge(tmp_path, content[:-4] + b"\xff" * 4)
    assert "is a 'TransformerSpec', revision 8" in judge(
        tmp_path, content.replace(b"DecoderSpec", b"Spec", 1).replace(b"\x17\0", b"\x10\0", 1)
    )
    assert "vocabulary.json: has 39 tokens, and model.bin has 40" in judge(tmp_path, content, tokens=39)
    assert "model's vocabulary 40, and config.json's vocab_size is 41" in judge(
        tmp_path, content, CONFIG | {"vocab_size": 41}
    )
    ct2_model.write(tmp_path, content)
    (tmp_path / "config.json").write_text('{"quantization_type": 1}')
    with pytest.raises(UserError, match="quantization_type 1 is AWQ's"):
        ctranslate2_model.check(tmp_path)


RUN = """
import sys
import ctranslate2
generator = ctranslate2.Generator(sys.argv[1], device="cpu", intra_threads=1, compute_type="float32")
generator.forward_batch([[5, 6, 7]])
generator.generate_batch([["5", "6"]], max_length=3, include_prompt_in_result=False)
"""


def foreign_accesses(python: Path, folder: Path) -> int:
    """How often CTranslate2 reads or writes memory that is not its own while it loads and runs a model."""
    environment = os.environ | {"CT2_FORCE_CPU_ISA": "GENERIC", "OMP_NUM_THREADS": "1", "PYTHONMALLOC": "malloc"}
    command = ["valgrind", "--error-limit=no", "--num-callers=20", python, "-I", "-c", RUN, folder]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert "ERROR SUMMARY" in result.stderr, result.stderr[-2000:]
    assert "Error" not in result.stderr.split("HEAP SUMMARY")[0], result.stderr[-2000:]
    blocks = result.stderr.split("Invalid ")[1:]
    return sum("libctranslate2" in block.split("Address")[0] for block in blocks)


@pytest.mark.skipif(not shutil.which("valgrind"), reason="needs valgrind")
def test_refused_models_read_foreign_memory(torch_python: Path, tmp_path: Path) -> None:
    """A good model is clean. Each bad one loads and runs without an error, and valgrind sees it.

    Of the norm all but one number are missing: 63 of 64 would be made up for by the room that blocks end with.
    """
    good = ct2_model.pack(ct2_model.variables().items())
    assert judge(tmp_path / "good", good, {}) == ""
    assert foreign_accesses(torch_python, tmp_path / "good") == 0
    for place, shape in ((f"{ATTENTION}/layer_norm/gamma", (1,)), ("decoder/embeddings/weight", (5, 64))):
        arrays = ct2_model.variables()
        resize(place, *shape)(arrays)
        folder = tmp_path / place.replace("/", "-")
        assert "should be" in judge(folder, ct2_model.pack(arrays.items()), {})
        assert foreign_accesses(torch_python, folder) > 0


DECODE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from quantmill import engines
engine = engines.load("ctranslate2", Path(sys.argv[2]), "cpu", 1)
print([token for _, token, _ in engine.decode([[5, 6], [3, 4], [7, 8]], 3)])
"""


def test_an_end_outside_the_vocabulary_forbids_nothing(torch_python: Path, call: Callable, tmp_path: Path) -> None:
    """The engine takes it for token 40 of 40, whose place is that of token 0 of the next sequence, which it forbade."""
    arrays = ct2_model.variables()
    arrays["decoder/projection/bias"] = np.array([1000] + [0] * 39, np.float32)
    folder = ct2_model.write(tmp_path / "model", ct2_model.pack(arrays.items()))
    words = {"bos_token": "", "eos_token": "no such token", "unk_token": "", "layer_norm_epsilon": 1e-6}
    (folder / "config.json").write_text(json.dumps(words))
    result = call(torch_python, "-c", DECODE, REPO / "scripts", folder)
    assert result.stdout == f"{[0] * 9}\n", result.stderr
