"""CTranslate2's files in a stream: the bytes of its own converter, memory that does not grow, nothing half-written."""

import json
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ct2_model
import numpy as np
import pytest
from conftest import REPO, line_of_refusal
from workflows import check_whole, wait_for

from quantmill.checkpoint import ctranslate2_bin, shards
from quantmill.checkpoint.ctranslate2_bin import Written
from quantmill.common.program import UserError

REFUSED = {
    "llama dynamic": "RoPE scaling type 'dynamic' is not yet implemented",
    "llama gelu": "its llama has no hidden_act gelu, only silu",
    "gemma2": "it has no attn_logit_softcapping",
    "gemma4 heads": "'head_dim' is a per-layer attribute and may vary across layers",
    "gemma4 unified text": "'Gemma4UnifiedTextConfig' object has no attribute 'enable_moe_block'",
    "mixtral": "No conversion is registered for the model configuration MixtralConfig",
    "mpt": "No conversion is registered for the model configuration MptConfig",
    "phi": "'PhiConfig' object has no attribute 'n_layer'",
}
ARCHITECTURES = (
    *("llama", "llama llama3", "llama tied", "llama attention_bias", "llama mlp_bias", "mistral", "mistral window"),
    *("qwen2", "qwen3", "gemma", "gemma2 without caps", "gemma3", "gemma3 with images", "gemma4"),
    *("gemma4 keys as values", "gemma4 unified", "gemma4 with images", "phi3", "phi3 longrope", "gpt2", "gptj"),
    *("gptj tied", "gpt_bigcode", "gpt_bigcode tied", "gpt_neox", "falcon", "falcon 40b", "falcon rw", "bloom"),
    *("codegen", "opt", "opt projected"),
)
CHECKPOINTS = (
    *("llama in bfloat16", "llama in float32", "gpt_neox in float32", "mixed dtypes", "equal layers"),
    *("equal layers of GPT-2", "tied but for one", "tied in vain", "tied twice", "names of OpenAI", "bin", "shards"),
)
HEADS = ("llama", "llama tied", "llama attention_bias", "llama mlp_bias", "falcon", "falcon 40b")
ADDED = {
    **{name: ["head_dim"] for name in HEADS},
    "llama llama3": ["head_dim", "original_max_position_embeddings", "rotary_scaling_factor"],
    **{name: ["queries_scale"] for name in ("gemma2 without caps", "gemma3", "gemma3 with images")},
}
QUANTIZATIONS = {"int8", "int8_float32", "int8_float16", "int8_bfloat16", "float16", "bfloat16", "float32"}
REMOTE = {"MPTConfig", "MixFormerSequentialConfig", "RWConfig"}  # of code that comes with models
NOT_CAUSAL = {"Bart", "Bert", "Camembert", "DistilBert", "M2M100", "MBart", "MT5", "Marian", "Pegasus", "Roberta", "T5"}
NOT_CAUSAL |= {"T5Gemma", "T5Gemma2", "UMT5", "Wav2Vec2", "Wav2Vec2Bert", "Whisper", "XLMRoberta"}
SHAPE = {"vocab_size": 4000, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False} | SHAPE
NEOX = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]} | SHAPE
MB = 10**6
SECONDS = 120


@pytest.fixture(scope="module")
def facts(torch_python: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = call(torch_python, REPO / "tests/build/ct2_bytes_checks.py", tmp_path_factory.mktemp("ct2"))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ARCHITECTURES + CHECKPOINTS)
def test_bytes_are_those_of_the_converter(facts: dict[str, Any], name: str) -> None:
    assert facts["models"][name] == {"differ": {quantization: [] for quantization in QUANTIZATIONS}}


@pytest.mark.parametrize("name", REFUSED)
def test_both_refuse_a_model_in_the_same_words(facts: dict[str, Any], name: str) -> None:
    assert facts["models"][name]["refused"].startswith(REFUSED[name])


def test_every_registered_architecture_is_judged(facts: dict[str, Any]) -> None:
    assert facts["models"].keys() == {*ARCHITECTURES, *CHECKPOINTS, *REFUSED}
    others = REMOTE | {f"{name}Config" for name in NOT_CAUSAL}
    assert {*facts["registered"]} - {*facts["compared"]} == others
    assert {*facts["compared"]} - {*facts["registered"]} == {"MixtralConfig", "MptConfig"}


def test_untouched_converter_writes_the_same_variables(facts: dict[str, Any]) -> None:
    """Quantmill adds numbers of the attention, without which the engine calculates something else. The converter as it
    is fails for GPT-NeoX and Phi-3."""
    assert {name: more for name, more in facts["added"].items() if more} == ADDED
    assert len(facts["added"]) == len(ARCHITECTURES) - 3


@pytest.mark.parametrize("arrays", ["of numpy", "of torch"])
def test_equal_arrays_of_a_loader_are_stored_once(facts: dict[str, Any], arrays: str) -> None:
    assert facts["pairs"][arrays] == []


def test_missing_weights_are_not_made_up(facts: dict[str, Any]) -> None:
    assert facts["lacking"] == "its checkpoint lacks model.layers.1.input_layernorm.weight"


def test_a_written_file_is_that_of_the_format(tmp_path: Path) -> None:
    arrays, alias = ct2_model.variables(int8=True), ("decoder/projection/weight", "decoder/embeddings/weight")
    del arrays[alias[0]], arrays["decoder/projection/weight_scale"]
    written = [
        Written(name, each.dtype.name, each.shape, [each.tobytes()[:1], each.tobytes()[1:]])
        for name, each in arrays.items()
    ]
    ctranslate2_bin.write(tmp_path / "model.bin", "TransformerDecoderSpec", 8, iter(written), [alias])
    assert (tmp_path / "model.bin").read_bytes() == ct2_model.pack(arrays.items(), [alias])
    contents = ctranslate2_bin.read(tmp_path / "model.bin")
    assert contents.variables.keys() == arrays.keys()
    assert contents.aliases == dict([alias])


def test_a_variable_beyond_the_format_is_one_line(tmp_path: Path) -> None:
    """A table of 262,144 tokens and 5,120 in float32, whose bytes do not fit their count."""
    table = Written("decoder/embeddings/weight", "float32", (262_144, 5_120), iter(()))
    with pytest.raises(UserError, match=r"embeddings/weight has 5\.4 GB as float32, and .* at most 4\.29; choose a"):
        ctranslate2_bin.write(tmp_path / "model.bin", "TransformerDecoderSpec", 8, [table], [])
    with pytest.raises(OSError, match="ends -4 bytes after its place"):
        table = Written("decoder/x", "float32", (2,), [np.float32(0).tobytes()])
        ctranslate2_bin.write(tmp_path / "model.bin", "TransformerDecoderSpec", 8, [table], [])


@pytest.fixture(scope="module")
def sources(torch_python: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make models of random weights: Llama's with 2 and 10 layers (71 and 289 MB), GPT-NeoX's (58 and 226 MB)."""
    folder, made = tmp_path_factory.mktemp("sources"), {}
    for family in (LLAMA, NEOX):
        for layers in (2, 10):
            name = f"{family['model_type']}-{layers}"
            config = folder / f"{name}.json"
            config.write_text(json.dumps(family | {"num_hidden_layers": layers, "max_position_embeddings": 512}))
            result = call(torch_python, "scripts/quantmill", "fetch.random_weights", config, folder / name)
            assert result.returncode == 0, result.stderr
            made[name] = folder / name
    return made


def command(python: Path, source: Path, out: Path, quantization: str) -> list[str]:
    parameters = json.dumps({"quantization": quantization})
    return [str(python), "scripts/quantmill", "build.ct2", str(source), str(out), "--parameters", parameters]


@pytest.fixture(scope="module")
def libraries(torch_python: Path) -> int:
    """Peak of resident memory of a process that has imported the program, in bytes."""
    program = "import sys; sys.path.insert(0, 'scripts'); from quantmill.build import ct2; "
    program += "from quantmill.common import manifest; print(manifest.peak_rss_bytes())"
    return int(subprocess.check_output([torch_python, "-c", program], cwd=REPO, text=True))


@pytest.mark.long
@pytest.mark.parametrize(("family", "quantization"), [("llama", "float16"), ("gpt_neox", "int8")])
def test_memory_does_not_grow_with_depth(
    sources: dict[str, Path],
    libraries: int,
    torch_python: Path,
    call: Callable,
    tmp_path: Path,
    family: str,
    quantization: str,
) -> None:
    """Peaks of resident memory. The deeper model has 218 MB more, or 168."""
    peaks = []
    for layers in (2, 10):
        out = tmp_path / f"{layers}"
        result = call(*command(torch_python, sources[f"{family}-{layers}"], out, quantization))
        assert result.returncode == 0, result.stderr
        peaks.append(json.loads((out / "quantmill.json").read_text())["peak_memory_bytes"])
        shutil.rmtree(out)
    assert peaks[1] - peaks[0] < 10 * MB
    largest = max(tensor.nbytes for tensor in shards.find(sources[f"{family}-10"]).tensors().values())
    assert peaks[1] - libraries < largest + 200 * MB


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_build_that_is_ended_leaves_nothing(
    sources: dict[str, Path], torch_python: Path, tmp_path: Path, end: signal.Signals
) -> None:
    """Nothing has the artifact's name, and the next build is whole."""
    out = tmp_path / "out"
    build = command(torch_python, sources["llama-10"], out, "float16")
    program = subprocess.Popen(build, cwd=REPO, stderr=subprocess.PIPE, text=True)
    model = tmp_path / ".out.partial/model.bin"
    wait_for(lambda: model.exists() and model.stat().st_size > MB)
    program.send_signal(end)
    said = program.communicate(timeout=SECONDS)[1]
    assert not out.exists()
    if end == signal.SIGTERM:
        assert said.splitlines()[-1] == "error: interrupted; nothing was written"
        assert list(tmp_path.iterdir()) == []
    subprocess.run(build, cwd=REPO, check=True, capture_output=True)
    assert check_whole(out).keys() >= {"model.bin", "config.json", "vocabulary.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_fills_is_one_line(sources: dict[str, Path], torch_python: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        command(torch_python, sources["llama-2"], tmp_path / "out", "float16"),
        cwd=REPO,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20 * MB, 20 * MB)),
    )
    line = "error: File too large, and nothing was written; free some space there and run again"
    assert line_of_refusal(result, tmp_path / "out") == line
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_tells_who_wrote_it(sources: dict[str, Path], torch_python: Path, tmp_path: Path) -> None:
    build = command(torch_python, sources["llama-2"], tmp_path / "out", "int8_bfloat16")
    subprocess.run(build, cwd=REPO, check=True, capture_output=True)
    made = json.loads((tmp_path / "out/quantmill.json").read_text())
    assert made["tool"] == "ctranslate2"
    assert made["written"].startswith("by Quantmill, in a stream, byte for byte as CTranslate2's converter writes")
    assert made["parameters"] == {"quantization": "int8_bfloat16"}
