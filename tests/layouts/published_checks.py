"""Run in envs/quantizers: small models in low bits, and transformers' own reading of them beside Quantmill's; as JSON.

    python tests/layouts/published_checks.py FOLDER TOOLS_PYTHON

The weights are rounded here with torch or by llm-compressor, and decoded by `fetch.link`, run by TOOLS_PYTHON. Then
transformers loads each model twice: as it was published, which transformers dequantizes, and as decoded.
"""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import torch  # noqa: E402
import transformers  # noqa: E402
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs  # noqa: E402
from datasets import Dataset  # noqa: E402
from llmcompressor import oneshot  # noqa: E402
from llmcompressor.modifiers.quantization import QuantizationModifier  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from quantmill.checkpoint import headers  # noqa: E402
from quantmill.fetch.name_tensors import name_tensors  # noqa: E402

Tensors = dict[str, torch.Tensor]
work, tools = Path(sys.argv[1]), sys.argv[2]
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
SHAPE |= {"max_position_embeddings": 64, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
EDGES = SHAPE | {"hidden_size": 192, "intermediate_size": 320}  # not in whole blocks of 128
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_routed_experts": 4, "n_group": 1}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
QWEN3 = transformers.Qwen3Config(**SHAPE)
DEEPSEEK = transformers.DeepseekV3Config(
    **{key: value for key, value in SHAPE.items() if key != "head_dim"} | EXPERTS | LATENT,
    topk_group=1,
    first_k_dense_replace=1,
)
DEEPSEEK.num_key_value_heads = 4
GPT_OSS = transformers.GptOssConfig(
    **SHAPE, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2
)
FLOAT8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # OCP Microscaling, 5.3.3
OF_THE_LIBRARY = ("_scale", "_zero_point", "_shape")  # what compressed-tensors keeps beside dequantized weights
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
facts: dict[str, Any] = {}


def build(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def plain(name: str, config: Any) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors and the config.json of a new model, as transformers saves them."""
    build(config).save_pretrained(work / "plain" / name)
    stored = load_file(work / "plain" / name / "model.safetensors")
    return stored, json.loads((work / "plain" / name / "config.json").read_text())


def save(name: str, tensors: Tensors, config: dict[str, Any], words: dict[str, Any]) -> None:
    """Write a model as its author would have published it, its tensors in two shards that part weights and scales."""
    folder = work / name
    folder.mkdir()
    order, half = sorted(tensors), len(tensors) // 2 + 1
    for number, names in enumerate((order[:half], order[half:]), 1):
        shard = {key: tensors[key].contiguous() for key in names}
        save_file(shard, folder / f"model-0000{number}-of-00002.safetensors", metadata={"format": "pt"})
    places = {key: f"model-0000{1 + (key in order[half:])}-of-00002.safetensors" for key in order}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": words}))


def is_quantized(name: str) -> bool:
    """Return whether a linear layer is quantized: all but the head and routers."""
    return name.endswith(".weight") and "proj" in name


def blocks(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in float8, and the scale of each block, the last ones of which may be cut."""
    rows, columns = (-(-side // size) for side in weight.shape)
    padded = torch.zeros(rows * size, columns * size)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    split = padded.view(rows, size, columns, size)
    scale = split.abs().amax((1, 3)) / 448
    rounded = (split / scale[:, None, :, None]).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return rounded.to(torch.float8_e4m3fn), scale


def float8(
    name: str, config: Any, size: int | None, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> None:
    """Publish a model in float8; size: of a block, None for a scale for each tensor. change: of its scales."""
    tensors, about = plain(name, config)
    for key in [key for key in tensors if is_quantized(key)]:
        weight = tensors[key]
        if size:
            tensors[key], scale = blocks(weight, size)
        else:
            scale = weight.float().abs().amax() / 448
            tensors[key] = (weight.float() / scale).to(torch.float8_e4m3fn)
            tensors[key.replace("weight", "activation_scale")] = torch.tensor(0.5)
        tensors[f"{key}_scale_inv"] = change(scale)
        if tensors[f"{key}_scale_inv"].dtype == torch.float8_e8m0fnu:  # numbers for the new scales
            whole = tensors[f"{key}_scale_inv"].float().repeat_interleave(size, 0).repeat_interleave(size, 1)
            tensors[key] = (weight.float() / whole).to(torch.float8_e4m3fn)
    words = FLOAT8 | {"weight_block_size": [size, size] if size else None}
    words |= {} if size else {"activation_scheme": "static"}
    save(name, tensors, about, words)


def mxfp4(name: str) -> None:
    """Publish gpt-oss in MXFP4: experts' matrices [inputs, outputs] lie turned, in groups of 32 inputs."""
    tensors, about = plain(name, GPT_OSS)
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        groups = tensors.pop(key).float().transpose(1, 2).unflatten(-1, (-1, 32))
        exponents = groups.abs().amax(-1).log2().floor() - 2
        numbers = ((groups / exponents.exp2()[..., None])[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
        tensors[f"{key}_blocks"] = numbers[..., ::2] | numbers[..., 1::2] << 4
        tensors[f"{key}_scales"] = (exponents + 127).to(torch.uint8)
    save(name, tensors, about, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})


def compressed(name: str, scheme: str | dict[str, Any], dtype: torch.dtype = torch.bfloat16, **more: Any) -> None:
    """Publish a model by llm-compressor."""
    groups = {"scheme": scheme} if isinstance(scheme, str) else {"config_groups": {"group_0": scheme}}
    recipe = QuantizationModifier(targets="Linear", ignore=["lm_head"], **groups, **more)
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(3)).tolist()
    data = {
        "dataset": Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 32] * 4}),
        "num_calibration_samples": 4,
    }
    source = work / "plain" / str(dtype)
    build(QWEN3, dtype).save_pretrained(source)
    for file in ("tokenizer.json", "tokenizer_config.json"):  # which llm-compressor wants, even for ids
        shutil.copy(REPO / "demo" / file, source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    oneshot(model=model, recipe=recipe, max_seq_length=32, **data)
    model.save_pretrained(work / name, save_compressed=True)


def load(folder: Path, **words: Any) -> Tensors:
    """Return the weights of a model that transformers loaded, in the dtype that config.json names."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **words).state_dict()


def decode(name: str) -> Path:
    """Run fetch.link, as the workflow does. Return the folder that it writes."""
    out = work / "decoded" / name
    subprocess.run([tools, str(REPO / "scripts/quantmill"), "fetch.link", str(work / name), str(out)], check=True)
    return out


def compare(name: str, theirs: Tensors | None = None, **words: Any) -> None:
    """Record how a decoded model differs from what transformers dequantizes with `words`, or from `theirs`."""
    out = decode(name)
    theirs, ours = load(work / name, **words) if theirs is None else theirs, load(out)
    about = json.loads((out / "quantmill.json").read_text())["source"]
    facts[name] = {
        "missing": [key for key in theirs if key not in ours and not key.endswith(OF_THE_LIBRARY)],
        "differing": sorted(key for key in ours if key not in theirs or not torch.equal(theirs[key], ours[key])),
        "dtypes": sorted({str(value.dtype) for value in ours.values()}),
        "said": about["decoded"],
        "hashed": sorted(about["sha256"]),
        "quantized": "quantization_config" in json.loads((out / "config.json").read_text()),
        "dropped": name_tensors(headers.read(out), further=False).dropped,
    }


def by_blocks(name: str) -> Tensors:
    """Return float8 weights as compressed-tensors' converter dequantizes them, which knows cut blocks."""
    stored = {key: value for file in (work / name).glob("*.safetensors") for key, value in load_file(file).items()}
    return FP8BlockDequantizer(targets=["re:.*proj.*"]).process(stored)


with contextlib.redirect_stdout(io.StringIO()):
    dequantized = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}
    float8("fp8", QWEN3, 128)
    float8("fp8-64", QWEN3, 64)
    float8("fp8-tensor", QWEN3, None, lambda scale: scale.to(torch.bfloat16))
    float8("fp8-e8m0", QWEN3, 128, lambda scale: scale.log2().ceil().exp2().to(torch.float8_e8m0fnu))
    float8("fp8-experts", DEEPSEEK, 128)
    for name in ("fp8", "fp8-64", "fp8-tensor", "fp8-e8m0", "fp8-experts"):
        compare(name, **dequantized)
    # matrices of 192 and 320 rows and columns, and DeepSeek's kv_a_proj_with_mqa of 160 rows
    float8("fp8-edges", transformers.Qwen3Config(**EDGES), 128)
    compare("fp8-edges", by_blocks("fp8-edges"))
    try:
        load(work / "fp8-edges", **dequantized)
    except (RuntimeError, ValueError) as error:
        facts["edges in transformers"] = str(error)
    theirs, ours = by_blocks("fp8-experts"), load_file(work / "decoded/fp8-experts/model.safetensors")
    facts["experts by blocks"] = [key for key in theirs if not torch.equal(theirs[key], ours[key])]
    mxfp4("mxfp4")
    compare("mxfp4", quantization_config=transformers.Mxfp4Config(dequantize=True))
    int4 = {"num_bits": 4, "type": "int", "symmetric": False}
    int8 = int4 | {"num_bits": 8}
    by_token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    published = {
        "w4a16": ("W4A16",),
        "w4a16-asym": ("W4A16_ASYM",),
        "w4a16-32": ({"targets": ["Linear"], "weights": int4 | {"group_size": 32}}, torch.float16),
        "w4a16-rows": ({"targets": ["Linear"], "weights": int4 | {"strategy": "channel"}},),
        "w8a16": ("W8A16",),
        "w8a16-asym": ({"targets": ["Linear"], "weights": int8 | {"group_size": 32}},),
        "w8a8": ("W8A8",),
        "w8a8-asym": (
            {"targets": ["Linear"], "weights": int8 | {"strategy": "channel"}, "input_activations": by_token},
        ),
        "ct-fp8": ("FP8",),
        "ct-fp8-rows": ("FP8_DYNAMIC",),
        "ct-fp8-blocks": ("FP8_BLOCK",),
    }
    for name, words in published.items():
        compressed(name, *words)
        compare(name, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    compressed("ct-fp8-cache", "FP8", kv_cache_scheme=cache)
    compare("ct-fp8-cache", load(work / "decoded/ct-fp8"))
    stored = load_file(work / "ct-fp8-cache/model.safetensors")
    facts["scales of the cache"] = sum(key.endswith(("k_scale", "v_scale")) for key in stored)
    for size in (None, -1, 32):
        said = QuantizationArgs(group_size=size)
        facts[f"without words, {size}"] = [said.num_bits, said.type, said.symmetric, said.strategy]
    compressed("nvfp4", "NVFP4A16")
    refused = [tools, str(REPO / "scripts/quantmill"), "fetch.link", str(work / "nvfp4"), str(work / "out")]
    facts["nvfp4"] = subprocess.run(refused, capture_output=True, text=True).stderr.splitlines()
print(json.dumps(facts))
