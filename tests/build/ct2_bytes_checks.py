"""Run in envs/torch: convert small models of every architecture to every quantization, in a stream and by CTranslate2's
own converter, and print what differs, as JSON.

    python tests/build/ct2_bytes_checks.py FOLDER
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path[:0] = [str(REPO / "scripts"), str(REPO / "tests/helpers")]

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from ct2_sources import GEMMA, IDS, LAYERS, MODELS, OLDER, SHAPE, source  # noqa: E402
from ctranslate2.converters import TransformersConverter  # noqa: E402
from ctranslate2.converters.transformers import _MODEL_LOADERS  # noqa: E402
from ctranslate2.specs.common_spec import LinearSpec  # noqa: E402
from ctranslate2.specs.model_spec import ModelSpec  # noqa: E402

from quantmill.build import ct2, ct2_stream  # noqa: E402
from quantmill.checkpoint import ctranslate2_bin  # noqa: E402
from quantmill.common.program import first_line  # noqa: E402

HALF = torch.float16
MANY_HEADS = SHAPE | {"multi_query": False}
OPT = SHAPE | {"ffn_dim": 96}
GEMMA4 = GEMMA | LAYERS | {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "sliding_window": 64}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA3_IMAGES = {
    "text_config": GEMMA | LAYERS | {"sliding_window": 64},
    "vision_config": TOWER | {"image_size": 28, "patch_size": 14},
    "mm_tokens_per_image": 4,
}
GEMMA4_IMAGES = {"text_config": GEMMA4, "vision_config": TOWER | {"num_key_value_heads": 2, "head_dim": 16}}
GPTJ = OLDER | {"rotary_dim": 8}
KINDS = (  # of MODELS, that differ in more than a number
    *("llama", "llama llama3", "llama tied", "llama attention_bias", "llama mlp_bias", "llama dynamic", "llama gelu"),
    *("mistral", "mistral window", "qwen2", "qwen3", "gemma", "gemma2", "gemma2 without caps", "gemma3", "phi3"),
    *("phi3 longrope", "gpt2", "gptj", "gpt_bigcode", "gpt_neox", "falcon", "mixtral"),
)
OTHERS = {
    "bloom": (transformers.BloomConfig, IDS | {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "codegen": (transformers.CodeGenConfig, GPTJ),
    "falcon 40b": (transformers.FalconConfig, MANY_HEADS | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon rw": (transformers.FalconConfig, MANY_HEADS | {"parallel_attn": False, "alibi": True, "bias": True}),
    "gemma3 with images": (transformers.Gemma3Config, GEMMA3_IMAGES),
    "gemma4": (transformers.Gemma4TextConfig, GEMMA4),
    "gemma4 heads": (transformers.Gemma4TextConfig, GEMMA4 | {"global_head_dim": 32}),
    "gemma4 keys as values": (transformers.Gemma4TextConfig, GEMMA4 | {"attention_k_eq_v": True}),
    "gemma4 unified": (transformers.Gemma4UnifiedConfig, {"text_config": GEMMA4}),
    "gemma4 unified text": (transformers.Gemma4UnifiedTextConfig, GEMMA4),
    "gemma4 with images": (transformers.Gemma4Config, GEMMA4_IMAGES),
    "gpt_bigcode tied": (transformers.GPTBigCodeConfig, OLDER | {"tie_word_embeddings": True}),
    "gptj tied": (transformers.GPTJConfig, GPTJ | {"tie_word_embeddings": True}),
    "mpt": (transformers.MptConfig, IDS | {"d_model": 64, "n_layers": 2, "n_heads": 4}),
    "opt": (transformers.OPTConfig, OPT),
    "opt projected": (transformers.OPTConfig, OPT | {"word_embed_proj_dim": 32}),
    "phi": (transformers.PhiConfig, SHAPE),
}


class Pair(ModelSpec):
    """Two equal layers, of which a loader made the arrays itself."""

    name = "Pair"

    def __init__(self, array: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.one, self.other = LinearSpec(), LinearSpec()
        for layer in (self.one, self.other):
            layer.weight = array(torch.arange(15.0).reshape(5, 3) / 7)
        self.validate()


class Whole(ct2.Converter):
    """CTranslate2's own way to write the same specification: it holds the model."""

    convert = TransformersConverter.convert

    def load_weights(self, model_class: Any, tensors: Mapping[str, Any], **options: Any) -> Any:
        return model_class.from_pretrained(self._model_name_or_path, **options)


def contents(folder: Path) -> dict[str, bytes]:
    """Read a folder's files, and remove it."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    return found


def refusal(call: Callable[[], object]) -> str | None:
    """Return what build.ct2 says for an error; None if there is none."""
    try:
        call()
    except Exception as error:
        return first_line(error)
    return None


def compare(folder: Path) -> dict[str, Any]:
    """Return which files differ, by quantization; or why both ways refuse the model, as `refused`."""
    out, loaded, differ = folder / "out", [], {}
    refused = refusal(lambda: loaded.append(ct2.Converter(str(folder)).load()))
    for quantization in ct2.QUANTIZATIONS:
        said = refusal(lambda chosen=quantization: Whole(str(folder)).convert(str(out), quantization=chosen))
        if refused or said:
            assert refused == said, folder
            return {"refused": refused}
        theirs = contents(out)
        ct2.save(loaded[0], out, quantization)
        mine = contents(out)
        differ[quantization] = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        assert sorted(mine) == ["config.json", "model.bin", "vocabulary.json"]
    return {"differ": differ}


def compare_pair(array: Callable[[torch.Tensor], Any]) -> list[str]:
    """Return the quantizations in which the files of two equal layers differ."""
    differ, mine, theirs = [], work / "mine.bin", work / "theirs.bin"
    for quantization in ct2.QUANTIZATIONS:
        ct2_stream.write(str(mine), Pair(array), quantization)
        whole = Pair(array)
        whole.optimize(quantization)
        whole._serialize(str(theirs))
        assert ctranslate2_bin.read(mine).aliases == {"other/weight": "one/weight"}
        if mine.read_bytes() != theirs.read_bytes():
            differ.append(quantization)
    return differ


def find_added(name: str) -> list[str]:
    """Return the ends of the names that the stream writes in addition to CTranslate2's converter as it is, whose other
    variables must be the same. That converter wants as many embeddings as the tokenizer has tokens."""
    tokens = transformers.AutoTokenizer.from_pretrained(folders[name]).get_vocab()
    folder = made(f"{name} plain", name, vocab_size=len(tokens))
    mine, theirs = folder / "mine", folder / "theirs"
    ct2.Converter(str(folder)).convert(str(mine), quantization="int8_float16")
    TransformersConverter(str(folder)).convert(str(theirs), quantization="int8_float16")
    here, there = (ctranslate2_bin.read(each / "model.bin") for each in (mine, theirs))
    for variable in there.variables:
        assert stored(mine, here.variables[variable]) == stored(theirs, there.variables[variable]), (name, variable)
    assert here.aliases == there.aliases
    more = here.variables.keys() - there.variables.keys()
    assert more or (mine / "model.bin").read_bytes() == (theirs / "model.bin").read_bytes()
    return sorted({variable.rpartition("/")[2] for variable in more})


def stored(folder: Path, variable: ctranslate2_bin.Variable) -> tuple[Any, ...]:
    data = (folder / "model.bin").read_bytes()[variable.start : variable.start + variable.nbytes]
    return variable.dtype, variable.shape, data


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the weights of a model."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def repeat_layer(weights: dict[str, torch.Tensor]) -> None:
    """Make the second layer equal to the first, with -0 for a 0."""
    for name in [name for name in weights if ".0." in name]:
        weights[name].reshape(-1)[3] = 0
        weights[name.replace(".0.", ".1.")] = weights[name].clone()
        weights[name.replace(".0.", ".1.")].reshape(-1)[3] = -0.0


def tie_all_but_one(weights: dict[str, torch.Tensor]) -> None:
    """Make the head equal to the embeddings, but for the last element."""
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"][-1, -1] += 1


def tie_in_vain(weights: dict[str, torch.Tensor]) -> None:
    """Add a head of other weights to a model whose config says that it is tied."""
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()


def tie_twice(weights: dict[str, torch.Tensor]) -> None:
    """Add the head to a tied model, as .bin checkpoints hold it."""
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


def mix_dtypes(weights: dict[str, torch.Tensor]) -> None:
    """Store norms in float32, and a matrix in bfloat16."""
    for name in weights:
        if "norm" in name or name.endswith("0.mlp.down_proj.weight"):
            weights[name] = weights[name].to(torch.float32 if "norm" in name else torch.bfloat16)


def drop_prefix(weights: dict[str, torch.Tensor]) -> None:
    """Name GPT-2's weights as OpenAI's checkpoint does."""
    for name in list(weights):
        weights[name.removeprefix("transformer.")] = weights.pop(name)


def to_bin(folder: Path) -> Path:
    """Store a model as torch.save does, one of its matrices transposed in the file."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    turned = "model.layers.0.mlp.down_proj.weight"
    weights[turned] = weights[turned].T.contiguous().T
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def to_shards(folder: Path) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=HALF)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def made(name: str, of: str, dtype: torch.dtype = HALF, **words: Any) -> Path:
    """Write a model like that which is called `of`."""
    config, usual = (MODELS | OTHERS)[of]
    return source(work / name.replace(" ", "-"), config, usual | words, dtype)


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)
work = Path(sys.argv[1])
folders = {name: made(name, name) for name in (*KINDS, *OTHERS)} | {
    "llama in bfloat16": made("bfloat16", "llama", torch.bfloat16),
    "llama in float32": made("float32", "llama", torch.float32),
    "gpt_neox in float32": made("neox", "gpt_neox", torch.float32),
    "mixed dtypes": rewrite(made("mixed", "llama"), mix_dtypes),
    "equal layers": rewrite(made("equal", "llama"), repeat_layer),
    "equal layers of GPT-2": rewrite(made("equal-gpt2", "gpt2"), repeat_layer),
    "tied but for one": rewrite(made("one", "llama"), tie_all_but_one),
    "tied in vain": rewrite(made("in-vain", "llama tied"), tie_in_vain),
    "tied twice": rewrite(made("twice", "llama tied"), tie_twice),
    "names of OpenAI": rewrite(made("openai", "gpt2"), drop_prefix),
    "bin": to_bin(made("bin", "llama")),
    "shards": to_shards(made("shards", "llama")),
}
lacking = rewrite(made("lacking", "llama"), lambda weights: weights.pop("model.layers.1.input_layernorm.weight"))
models = {name: compare(folder) for name, folder in folders.items()}
convertible = {name for name in (*KINDS, *OTHERS) if "differ" in models[name]} - {"gpt_neox", "phi3", "phi3 longrope"}
facts = {
    "models": models,
    "added": {name: find_added(name) for name in convertible},
    "pairs": {"of numpy": compare_pair(torch.Tensor.numpy), "of torch": compare_pair(torch.Tensor.contiguous)},
    "lacking": refusal(ct2.Converter(str(lacking)).load),
    "registered": sorted(_MODEL_LOADERS),
    "compared": sorted({type(transformers.AutoConfig.from_pretrained(folder)).__name__ for folder in folders.values()}),
}
print(json.dumps(facts))
