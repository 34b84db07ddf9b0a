"""Run in envs/torch: convert small models of every architecture to every quantization, in a stream and by CTranslate2's
own converter, and print what differs, as JSON.

    python tests/build/ct2_bytes_checks.py FOLDER
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path[:0] = [str(REPO / "scripts"), str(REPO / "tests/helpers")]

import numpy as np  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from ct2_sources import GEMMA, IDS, LAYERS, MODELS, OLDER, SHAPE, source  # noqa: E402
from ctranslate2.converters import TransformersConverter  # noqa: E402
from ctranslate2.converters.transformers import _MODEL_LOADERS  # noqa: E402

from quantmill.build import ct2, deferred  # noqa: E402
from quantmill.checkpoint import ctranslate2_bin, shards  # noqa: E402
from quantmill.common.program import first_line  # noqa: E402

HALF = torch.float16
MANY_HEADS = SHAPE | {"multi_query": False}
OPT = SHAPE | {"ffn_dim": 96}
GEMMA4 = GEMMA | LAYERS | {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "sliding_window": 64}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 14}
GEMMA3_IMAGES = {
    "text_config": GEMMA | LAYERS | {"sliding_window": 64},
    "vision_config": TOWER,
    "mm_tokens_per_image": 4,
}
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
    "gpt_bigcode tied": (transformers.GPTBigCodeConfig, OLDER | {"tie_word_embeddings": True}),
    "gptj tied": (transformers.GPTJConfig, GPTJ | {"tie_word_embeddings": True}),
    "mpt": (transformers.MptConfig, IDS | {"d_model": 64, "n_layers": 2, "n_heads": 4}),
    "opt": (transformers.OPTConfig, OPT),
    "opt projected": (transformers.OPTConfig, OPT | {"word_embed_proj_dim": 32}),
    "phi": (transformers.PhiConfig, SHAPE),
}


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
            assert refused == said
            return {"refused": refused}
        theirs = contents(out)
        ct2.save(loaded[0], out, quantization)
        mine = contents(out)
        differ[quantization] = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        assert sorted(mine) == ["config.json", "model.bin", "vocabulary.json"]
    return {"differ": differ}


def added(name: str) -> list[str]:
    """Return the ends of the names that the stream writes in addition to CTranslate2's converter as it is, whose other
    variables must be the same. That converter wants as many embeddings as the tokenizer has tokens."""
    tokens = transformers.AutoTokenizer.from_pretrained(folders[name]).get_vocab()
    folder = made(f"{name} plain", name, vocab_size=len(tokens))
    mine, theirs = folder / "mine", folder / "theirs"
    ct2.Converter(str(folder)).convert(str(mine), quantization="int8_float16")
    TransformersConverter(str(folder)).convert(str(theirs), quantization="int8_float16")
    here, there = (ctranslate2_bin.read(each / "model.bin") for each in (mine, theirs))
    for name, variable in there.variables.items():
        assert stored(mine, here.variables[name]) == stored(theirs, variable), name
    assert here.aliases == there.aliases
    return sorted({name.rpartition("/")[2] for name in here.variables.keys() - there.variables.keys()})


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


def assigned(tensor: torch.Tensor) -> torch.Tensor:
    """Turn some columns, as GPT-J's loader does."""
    view = tensor.reshape(8, 8, -1)
    view[:, :4] = view[:, :4].flip(1)
    return view.reshape(tensor.shape)


def added_to(tensor: torch.Tensor) -> torch.Tensor:
    tensor += 1
    return tensor


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "a transposed view": lambda tensor: tensor.T,
    "rows": lambda tensor: tensor[3:],
    "a permutation": lambda tensor: tensor[torch.arange(63, -1, -1), :],
    "the second half": lambda tensor: tensor.chunk(2, dim=0)[1],
    "joined rows": lambda tensor: torch.cat([tensor, torch.zeros(2, 64, dtype=tensor.dtype), tensor.float().half()]),
    "joined columns": lambda tensor: torch.cat([tensor, tensor], dim=1),
    "another dtype": lambda tensor: tensor.to("cpu", torch.float32) + 1.0,
    "ones": lambda tensor: torch.ones_like(tensor).float().numpy(),
    "a number": lambda tensor: tensor.sum().item(),
    "where it is not 0": lambda tensor: tensor.nonzero(),
    "a truth": lambda tensor: bool((tensor < 9).all()),
    "an equal one": lambda tensor: torch.equal(tensor, tensor.clone()),
    "an unequal one": lambda tensor: torch.equal(tensor, tensor + 1),
    "assigned columns": assigned,
    "its size": lambda tensor: (tensor.shape, tensor.dtype, tensor.device, tensor.is_meta, len(tensor), tensor.numel()),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor).data.contiguous(),
}
REFUSED_FUNCTIONS = {
    "in place": lambda tensor: tensor.mul_(2),
    "in place by an operator": added_to,
    "into another": lambda tensor: torch.add(tensor, 1, out=torch.empty(64, 64)),
    "a pointer": lambda tensor: tensor.data_ptr(),
}


def calculate(folder: Path) -> dict[str, bool | str]:
    """Return for each function whether it gives the same for a deferred tensor as for the tensor, or why not."""
    name = "model.layers.0.self_attn.q_proj.weight"
    real, stored = safetensors.torch.load_file(folder / "model.safetensors")[name], shards.find(folder).tensors()[name]
    found: dict[str, bool | str] = {}
    for what, function in FUNCTIONS.items():
        mine, theirs = function(deferred.of(stored)), function(real.clone())
        if isinstance(mine, torch.Tensor):
            mine = torch.cat([block.clone() for block in deferred.blocks(mine)])
            found[what] = mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        else:
            found[what] = bool(np.all(mine == theirs))
    for what, function in REFUSED_FUNCTIONS.items():
        found[what] = str(refusal(partial(function, deferred.of(stored))))
    return found


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
plain = ("llama", "llama tied", "mistral", "qwen2", "qwen3", "gpt2", "gptj", "gpt_bigcode", "codegen", "bloom", "opt")
facts = {
    "models": {name: compare(folder) for name, folder in folders.items()},
    "added": {name: added(name) for name in plain},
    "functions": calculate(folders["llama"]),
    "lacking": refusal(ct2.Converter(str(lacking)).load),
    "registered": sorted(_MODEL_LOADERS),
    "compared": sorted({type(transformers.AutoConfig.from_pretrained(folder)).__name__ for folder in folders.values()}),
}
print(json.dumps(facts))
