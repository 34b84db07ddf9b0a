"""Run in envs/torch: which tensors of small checkpoints their models use, and what is said of those that are wrong; as
JSON.

    python tests/checkpoint/used_tensors_checks.py FOLDER
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from quantmill.build.count_experts import Counts  # noqa: E402
from quantmill.checkpoint import headers, shards  # noqa: E402
from quantmill.common import remote_code  # noqa: E402
from quantmill.common.program import UserError  # noqa: E402
from quantmill.fetch.name_tensors import name_tensors  # noqa: E402

work = Path(sys.argv[1])
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
MODELS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "tied": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, head_dim=8),
    "qwen3_5": transformers.Qwen3_5TextConfig(**SHAPE, head_dim=8, layer_types=["full_attention"] * 2),
    "deepseek": transformers.DeepseekV3Config(
        **SHAPE, **EXPERTS, **LATENT, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1
    ),
}
remote_code.forbid()
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
facts: dict[str, Any] = {}
models: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {}
for name, config in MODELS.items():
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    made.save_pretrained(work / "models" / name)
    stored = load_file(work / "models" / name / "model.safetensors")
    models[name] = stored, json.loads((work / "models" / name / "config.json").read_text())


def unchecked(folder: Path) -> headers.Model:
    """Return a model whose config.json was not compared with its headers, so that transformers judges all of it."""
    found = shards.find(folder)
    return headers.Model(found, found.config(), found.tensors(), "")


def look(name: str, model: str, change: Callable[[dict[str, Any], dict[str, Any]], Any], further: bool = False) -> None:
    """Record what is said of a model whose tensors and config are changed."""
    tensors, config = dict(models[model][0]), dict(models[model][1])
    change(tensors, config)
    folder = work / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.clone().contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    try:
        found = name_tensors(unchecked(folder), further)
    except UserError as error:
        facts[name] = {"error": str(error).removeprefix(f"{folder}: ")}
        return
    sorted_out = {"beside": found.beside, "dropped": found.dropped}
    facts[name] = sorted_out | {"all": found.used == {key: list(tensors[key].shape) for key in models[model][0]}}
    facts[name]["used"] = len(found.used) - len(models[model][0])


def layer(tensors: dict[str, Any], number: int, source: int = 1) -> None:
    """Write a layer once more, under another number."""
    for key in [key for key in tensors if f".layers.{source}." in key]:
        tensors[key.replace(f".layers.{source}.", f".layers.{number}.")] = tensors[key]


def predictor(tensors: dict[str, Any]) -> None:
    """DeepSeek's layer behind the last, which guesses a further token."""
    layer(tensors, 2)
    matrix = torch.ones(32, 64)
    tensors |= {"model.layers.2.eh_proj.weight": matrix, "model.layers.2.enorm.weight": matrix[0, :32]}


def cut(tensors: dict[str, Any], *parts: str) -> None:
    """Take out what has one of these parts in its name."""
    for key in [key for key in tensors if any(part in key for part in parts)]:
        del tensors[key]


Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj.weight"
MASK, CONSTANT = torch.ones(1, 1, 64, 64, dtype=torch.uint8), torch.tensor(-1e4)
for name in MODELS:
    look(f"{name} whole", name, lambda tensors, config: None)
for name, tensor in (
    ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)),
    ("model.layers.0.self_attn.rotary_emb.cos_cached", torch.ones(1, 1, 64, 8)),
    ("model.layers.0.self_attn.bias", MASK),
    ("model.layers.0.self_attn.masked_bias", CONSTANT),
    ("model.embeddings.position_ids", torch.arange(64)),
):
    look(f"llama {name}", "llama", lambda tensors, config, name=name, tensor=tensor: tensors.update({name: tensor}))
old = {"transformer.h.0.attn.bias": MASK, "transformer.h.0.attn.masked_bias": CONSTANT}
look("gpt2 masks", "gpt2", lambda tensors, config: tensors.update(old))
look("a bias", "llama", lambda tensors, config: tensors.update({f"{Q}.bias": torch.ones(32)}))
look(
    "a bias that is a row of a mask", "llama", lambda tensors, config: tensors.update({f"{Q}.bias": torch.ones(1, 32)})
)
look("a layer more", "llama", lambda tensors, config: layer(tensors, 2))
for count in (1, -3):
    look(f"{count} layers", "llama", lambda tensors, config, count=count: config.update(num_hidden_layers=count))
look("a layer too few", "llama", lambda tensors, config: config.update(num_hidden_layers=3))
look("other sizes", "llama", lambda tensors, config: config.update(intermediate_size=16))
look("int8", "llama", lambda tensors, config: tensors.update({UP: torch.ones(32, 32, dtype=torch.int8)}))
look("float8", "llama", lambda tensors, config: tensors.update({UP: torch.ones(32, 32).to(torch.float8_e4m3fn)}))
scaled = {UP: torch.ones(32, 32, dtype=torch.int8), f"{UP}_scale": torch.ones(32, 1)}
look("int8 with a scale", "llama", lambda tensors, config: tensors.update(scaled))
look("a scale alone", "llama", lambda tensors, config: tensors.update({f"{UP}_scale_inv": torch.tensor(1.0)}))
look("lora", "llama", lambda tensors, config: tensors.update({f"{Q}.lora_A.default.weight": torch.ones(4, 32)}))
look("a head for classes", "llama", lambda tensors, config: tensors.update({"score.weight": torch.ones(2, 32)}))
look("no head", "llama", lambda tensors, config: cut(tensors, "lm_head"))
head = {"lm_head.weight": models["tied"][0]["model.embed_tokens.weight"]}
look("a tied head that is stored", "tied", lambda tensors, config: tensors.update(head))
look("an expert too few", "mixtral", lambda tensors, config: cut(tensors, ".0.block_sparse_moe.experts.3."))
look("fewer experts", "mixtral", lambda tensors, config: config.update(num_local_experts=3))
look("no router", "qwen3_moe", lambda tensors, config: cut(tensors, "layers.0.mlp.gate.weight"))
look("deepseek's predictor", "deepseek", lambda tensors, config: predictor(tensors))
look("deepseek's predictor, used", "deepseek", lambda tensors, config: predictor(tensors), True)
look("deepseek's layer too many", "deepseek", lambda tensors, config: layer(tensors, 61))
look("mtp", "qwen3_moe", lambda tensors, config: tensors.update({"mtp.layers.0.mlp.gate.weight": torch.ones(4, 32)}))
tower = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(8, 8)}
look("a tower", "qwen3_5", lambda tensors, config: tensors.update(tower))
look("an unknown model", "llama", lambda tensors, config: config.update(model_type="nobodys"))
# a text of 20 tokens through the mixtures
facts["experts"] = {}
for name in ("mixtral", "qwen3_moe", "deepseek"):
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "models" / name, dtype=torch.float32)
    counts = Counts(model)
    model(input_ids=torch.arange(20)[None])
    sums = {path: int(tokens.sum()) for path, tokens in counts.tokens.items()}
    facts["experts"][name] = {"sums": sums, "said": counts.as_json()}
dense = transformers.AutoModelForCausalLM.from_config(MODELS["llama"])
facts["experts"]["dense"] = Counts(dense).as_json()
print(json.dumps(facts))
