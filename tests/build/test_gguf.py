"""GGUF artifacts: the bytes that llama.cpp's own programs write, its own figures, and tokenizers that are proved."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, interpreter

from quantmill.checkpoint import gguf_file

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SHAPE: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512}
SHAPE |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.05}


@pytest.fixture(scope="module")
def facts(gguf_model: Path, build_gguf: Callable, run_gguf: Callable) -> dict[str, Any]:
    """Run tests/build/gguf_checks.py on the artifacts."""
    kinds = ("f16", "q8_0", "q4_k_m", "iq4_xs", "iq2_m")
    folders = [build_gguf(kind) for kind in kinds]
    result = run_gguf("tests/build/gguf_checks.py", gguf_model, *folders)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def manifest(artifact: Path) -> dict[str, Any]:
    return json.loads((artifact / "quantmill.json").read_text())


def test_the_converter_by_hand_writes_the_same_bytes(
    llama_cpp: Path, gguf_model: Path, build_gguf: Callable, tmp_path: Path
) -> None:
    """By hand: as its own message says, the kind of the tokenizer is written into a copy of the converter."""
    source = shutil.copytree(
        (llama_cpp / "source").resolve(), tmp_path / "source", ignore=shutil.ignore_patterns("ggml", "tools")
    )
    code = (source / "conversion/base.py").read_text()
    refusal = 'raise NotImplementedError("BPE pre-tokenizer was not recognized'
    assert refusal in code
    (source / "conversion/base.py").write_text(code.replace(refusal, f'return "gpt-2"  # {refusal}'))
    command = [interpreter("llama_cpp"), source / "convert_hf_to_gguf.py", gguf_model / "safetensors"]
    command += ["--outfile", tmp_path / "by-hand.gguf", "--outtype", "f16", "--model-name", "demo"]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    assert (tmp_path / "by-hand.gguf").read_bytes() == (build_gguf("f16") / "model.gguf").read_bytes()


def test_llama_quantize_by_hand_writes_the_same_bytes(llama_cpp: Path, gguf_model: Path, build_gguf: Callable) -> None:
    made = build_gguf("q4_k_m") / "model.gguf"
    command = [llama_cpp / "bin/llama-quantize", "--imatrix", "imatrix/imatrix.gguf", "gguf-f16/model.gguf"]
    command += [gguf_model / "by-hand.gguf", "q4_k_m", 1]
    subprocess.run([*map(str, command)], check=True, capture_output=True, cwd=gguf_model)
    assert (gguf_model / "by-hand.gguf").read_bytes() == made.read_bytes()


def test_what_tensors_are_stored_as_is_read_back(facts: dict[str, Any], build_gguf: Callable) -> None:
    """Rows of 640 are not a multiple of 256: llama-quantize takes another type for them by itself."""
    for kind, said in facts["files"].items():
        record = manifest(build_gguf(kind))
        assert record["parameters"]["tensors"] == said["types"]
        assert record["bits_per_weight"] == pytest.approx(said["bits_per_weight"], rel=0.1)  # the tokenizer counts too
    assert facts["files"]["q4_k_m"]["types"].keys() & {"Q5_0", "Q8_0"}
    assert facts["files"]["iq4_xs"]["types"]["IQ4_NL"] == 7  # a layer has one
    assert set(facts["files"]["f16"]["types"]) == {"F16", "F32"}


def test_perplexity_of_float16_is_that_of_transformers(facts: dict[str, Any]) -> None:
    assert facts["perplexity"]["f16"] == pytest.approx(facts["perplexity"]["transformers"], rel=1e-5)


def test_quantized_weights_lose_the_known_amount(facts: dict[str, Any]) -> None:
    """Of the demo by llama.cpp's own programs, in other hands: Q8_0 0.9994, IQ4_XS and Q4_K_M below 1.006."""
    ratio = {kind: value / facts["perplexity"]["transformers"] for kind, value in facts["perplexity"].items()}
    assert ratio["q8_0"] == pytest.approx(1, abs=2e-3)
    assert 0.99 < ratio["q4_k_m"] < 1.015
    assert 0.99 < ratio["iq4_xs"] < 1.015
    assert 1.02 < ratio["iq2_m"] < 1.6


def test_llama_perplexity_prints_our_figure(
    llama_cpp: Path, gguf_model: Path, build_gguf: Callable, run_gguf: Callable, tmp_path: Path
) -> None:
    """The protocol llamacpp-512 on the same file and text, to the last digit that is printed."""
    # It ends without waiting for the thread that prints, so its last lines can be lost: they are of a second copy.
    text = tmp_path / "twice.txt"
    text.write_bytes((gguf_model / "evaluation.txt").read_bytes() * 2)
    command = [llama_cpp / "bin/llama-perplexity", "-m", build_gguf("q4_k_m") / "model.gguf", "-f", text]
    result = subprocess.run([*map(str, command), "-c", "512", "-t", "1"], capture_output=True, text=True, check=True)
    printed = re.findall(r"\[\d+\]([\d.]+)", result.stdout)
    found = score(run_gguf, "llama_cpp", build_gguf("q4_k_m"), gguf_model / "evaluation.json", "llamacpp-512")
    assert len(found) == 30
    assert printed[: len(found)] == [f"{figure:.4f}" for figure in found]


def score(run_gguf: Callable, *arguments: object) -> list[float]:
    """Return an artifact's perplexity by an engine, by a protocol, up to the end of each window."""
    result = run_gguf("tests/build/score.py", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def typed(kind: str) -> str:
    """Return the flag of build.gguf that names a type."""
    return f"--parameters={json.dumps({'type': kind})}"


def test_random_weights_get_a_file_without_a_tokenizer(
    gguf_model: Path, run_gguf: Callable, call: Callable, torch_python: Path, tools_python: Path, tmp_path: Path
) -> None:
    """llama.cpp predicts from it what transformers does; and it is quantized, without an importance matrix."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    evaluation = tmp_path / "evaluation.json"
    for python, program, *arguments in (
        (torch_python, "fetch.random_weights", tmp_path / "config.json", tmp_path / "source"),
        (tools_python, "checkpoint.to_safetensors", tmp_path / "source", tmp_path / "safetensors"),
        (torch_python, "tokens.tokenize_texts", tmp_path / "source", gguf_model / "evaluation.txt", evaluation),
    ):
        more = ["--as", "evaluation"] if program == "tokens.tokenize_texts" else []
        result = call(python, REPO / "scripts/quantmill", program, *arguments, *more)
        assert result.returncode == 0, result.stderr
    text = ["--evaluation", evaluation, "--text", gguf_model / "evaluation.txt"]
    for kind, how in (("f16", text), ("q4_k_m", ["--base", tmp_path / "f16"])):
        result = run_gguf("build.gguf", tmp_path / "safetensors", tmp_path / kind, typed(kind), *how)
        assert result.returncode == 0, result.stderr
    assert manifest(tmp_path / "f16")["parameters"]["pre_tokenizer"] == "none"
    metadata = gguf_file.read_all(tmp_path / "f16/model.gguf").metadata
    assert [name for name in metadata if name.startswith("tokenizer.")] == ["tokenizer.ggml.model"]
    assert "Q4_K" in manifest(tmp_path / "q4_k_m")["parameters"]["tensors"]
    found = score(run_gguf, "llama_cpp", tmp_path / "f16", evaluation, "gptq-2048")
    due = score(run_gguf, "transformers", tmp_path / "safetensors", evaluation, "gptq-2048")
    assert found == pytest.approx(due, rel=5e-5)  # up to each window's end; keys and values are float16


def with_tokenizer(
    gguf_model: Path, folder: Path, call: Callable, torch_python: Path, steps: list[dict[str, Any]]
) -> Path:
    """Return the demo whose text is split by other rules, with the ids that its tokenizer makes."""
    shutil.copytree(gguf_model / "safetensors", folder / "safetensors")
    path = folder / "safetensors/tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    path.unlink()
    path.write_text(json.dumps(content))
    record = manifest(folder / "safetensors")
    del record["files"]["tokenizer.json"]
    (folder / "safetensors/quantmill.json").write_text(json.dumps(record))
    command = (torch_python, REPO / "scripts/quantmill", "tokens.tokenize_texts", folder / "safetensors")
    result = call(*command, gguf_model / "evaluation.txt", folder / "evaluation.json", "--as", "evaluation")
    assert result.returncode == 0, result.stderr
    return folder


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        (
            [{"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Isolated", "invert": False}, BYTES],
            "llama-bpe",
        ),
        ([{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}], "smollm"),
    ],
)
def test_an_unlisted_tokenizer_is_derived_and_proved(
    gguf_model: Path,
    run_gguf: Callable,
    call: Callable,
    torch_python: Path,
    tmp_path: Path,
    steps: list[dict[str, Any]],
    kind: str,
) -> None:
    root = with_tokenizer(gguf_model, tmp_path, call, torch_python, steps)
    text = ["--evaluation", root / "evaluation.json", "--text", gguf_model / "evaluation.txt"]
    result = run_gguf("build.gguf", root / "safetensors", root / "out", typed("f16"), *text)
    assert result.returncode == 0, result.stderr
    assert manifest(root / "out")["parameters"]["pre_tokenizer"] == kind


def test_an_impossible_tokenizer_is_refused(
    gguf_model: Path, run_gguf: Callable, call: Callable, torch_python: Path, tmp_path: Path
) -> None:
    """It splits at every letter e."""
    steps = [{"type": "Split", "pattern": {"String": "e"}, "behavior": "Isolated", "invert": False}, BYTES]
    root = with_tokenizer(gguf_model, tmp_path, call, torch_python, steps)
    text = ["--evaluation", root / "evaluation.json", "--text", gguf_model / "evaluation.txt"]
    result = run_gguf("build.gguf", root / "safetensors", root / "out", typed("f16"), *text)
    assert result.returncode == 1
    assert "llama.cpp's tokenizer makes other ids than the model's own, from token " in result.stderr.splitlines()[-1]
    assert not (root / "out").exists()


def test_a_tensor_of_another_model_is_refused(facts: dict[str, Any]) -> None:
    assert facts["swapped"].endswith("model.layers.0.self_attn.q_proj.weight is another tensor than the source's")


def test_an_importance_matrix_is_of_the_study_s_calibration(gguf_model: Path, build_gguf: Callable) -> None:
    build_gguf("q4_k_m")
    record = manifest(gguf_model / "imatrix")
    assert record["parameters"] == {"samples": 4, "sequence_length": 128}
    assert manifest(build_gguf("q4_k_m"))["calibration_sha256"] == record["calibration_sha256"]
    assert manifest(build_gguf("q4_k_m"))["parameters"]["imatrix"] == record["files"]["imatrix.gguf"]["sha256"]
