"""Run in envs/torch: facts of models that run block by block, as JSON. The models are tiny and random."""

import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quantmill import engines
from quantmill.common.program import UserError

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
HEADS = {"head_dim": 16}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
MIXTURE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}  # one block of another type
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 32}
SHARED = {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2}
SHARED |= {"altup_num_inputs": 2, "laurel_rank": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 32},
    "mixtral": MIXTURE,
    "qwen2": {},
    "qwen3": HEADS,
    "qwen3_moe": MIXTURE | HEADS,
    "qwen3_next": MIXTURE | HEADS | LINEAR,  # attention and recurrent blocks
    "gemma2": HEADS,
    "gemma3_text": HEADS | {"sliding_window": 32},
    "gemma3n_text": HEADS | SHARED,  # later blocks read keys of earlier ones
    "phi3": {},
    "gpt_oss": MIXTURE | HEADS,
    "olmo2": {},
    "glm4": HEADS,
    "smollm3": {},
    "granite": {},
    "deepseek_v2": MIXTURE | LATENT | {"q_lora_rank": None},
    "deepseek_v3": MIXTURE | LATENT | {"q_lora_rank": 16},
    "starcoder2": {},
    "stablelm": {},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "falcon": {"new_decoder_architecture": False},
    "cohere2": HEADS,
    "phi": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 4, "n_head": 4},
    "mamba": {},
    "jamba": MIXTURE | {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
}
TEXTS = [[(place * 7 + length) % 250 + 3 for place in range(length)] for length in (64, 17, 64)]
TEXTS[2].reverse()


def make(folder: Path, kind: str, **changes: Any) -> Path:
    """Save a random model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes}, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def logits(engine: engines.Engine) -> list[np.ndarray]:
    """Return the logits of all texts."""
    engine.read_ahead(TEXTS)
    return [np.concatenate([chunk.copy() for chunk in engine.logits(ids)]) for ids in TEXTS]


def refusal(folder: Path, stream: bool = True) -> str:
    """Return why a model is refused."""
    try:
        logits(engines.load("transformers", folder, "cpu", 1, stream=stream))
    except UserError as error:
        return str(error).replace(str(folder), "MODEL")
    return "not refused"


def equal(folder: Path) -> dict[str, bool]:
    """Return whether logits are bit by bit those of the model as a whole, with states in memory and on the disk."""
    whole = logits(engines.load("transformers", folder, "cpu", 1, stream=False))
    engine = engines.load("transformers", folder, "cpu", 1, stream=True)
    found = {"memory": all(map(np.array_equal, whole, logits(engine)))}
    engine.streamed.on_disk = True
    return found | {"disk": all(map(np.array_equal, whole, logits(engine))), "decodes": not engine.no_decoding}


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Put other tensors into a checkpoint, or leave some out."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: each for name, each in tensors.items() if each is not None}, folder / "model.safetensors")


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for kind, changes in MODELS.items():
            found[kind] = equal(make(root / kind, kind, **changes))
        folder = root / "llama"
        late = engines.load("transformers", folder, "cpu", 1, stream=True)  # nothing was said before
        early = engines.load("transformers", folder, "cpu", 1, stream=False)
        found["unannounced"] = all(map(np.array_equal, next(late.logits(TEXTS[0])), next(early.logits(TEXTS[0]))))
        weights = load_file(folder / "model.safetensors")
        name = "model.layers.2.mlp.down_proj.weight"
        change(folder, {name: torch.full_like(weights[name], torch.nan)})
        found["not finite"] = refusal(folder)
        change(folder, {name: None})
        found["missing"] = refusal(folder)
        change(folder, {name: torch.zeros(3, 3)})
        found["another shape"] = refusal(folder)
        change(folder, {name: weights[name]})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
        engine = engines.load("transformers", folder, "cpu", 1, stream=True)
        engine.streamed.on_disk = True
        try:
            engine.read_ahead(TEXTS)
        except UserError as error:
            found["full disk"] = str(error).partition(": ")[2]
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        found["goes on"] = all(map(np.array_equal, logits(engine), logits(early)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
