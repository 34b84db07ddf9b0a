"""The shapes of common decoders' tensors, as transformers' classes have them, from the sizes in a config.json.

Other architectures, and sizes that a config.json leaves to its class, are not checked here; the class itself decides.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quantmill.checkpoint import EXPERTS, reads_more_than_text
from quantmill.checkpoint.tensor import Tensor


def _table(text: str) -> dict[str, str]:
    """Return tensor's name -> letters of its shape. A line has a module's name, the shape of its weight, and of its
    bias."""
    found: dict[str, str] = {}
    for module, *shapes in map(str.split, text.strip().splitlines()):
        found |= {f"{module}.{part}": shape for part, shape in zip(("weight", "bias"), shapes, strict=False)}
    return found


# A letter for each dimension: H hidden, Q all heads, K all key heads, A these and both keys and values, D one head,
# I inner, G twice that, M inner of an expert, E experts, V vocabulary, T three times H
LLAMA = _table("""
    embed_tokens VH
    norm H
    lm_head VH
    input_layernorm H
    post_attention_layernorm H
    pre_feedforward_layernorm H
    post_feedforward_layernorm H
    self_attn.q_proj QH Q
    self_attn.k_proj KH K
    self_attn.v_proj KH K
    self_attn.o_proj HQ H
    self_attn.qkv_proj AH
    mlp.gate_proj IH I
    mlp.up_proj IH I
    mlp.down_proj HI H
    mlp.gate_up_proj GH
    mlp.gate EH
    mlp.experts.*.gate_proj MH
    mlp.experts.*.up_proj MH
    mlp.experts.*.down_proj HM
    block_sparse_moe.gate EH
    block_sparse_moe.experts.*.w1 IH
    block_sparse_moe.experts.*.w2 HI
    block_sparse_moe.experts.*.w3 IH
""")
HEAD_NORMS = _table("""
    self_attn.q_norm D
    self_attn.k_norm D
""")
GPT2 = _table("""
    wte VH
    ln_f H H
    ln_1 H H
    ln_2 H H
    attn.c_attn HT T
    attn.c_proj HH H
    mlp.c_fc HI I
    mlp.c_proj IH H
    lm_head VH
""")
NEOX = _table("""
    embed_in VH
    final_layer_norm H H
    input_layernorm H H
    post_attention_layernorm H H
    attention.query_key_value TH T
    attention.dense HH H
    mlp.dense_h_to_4h IH I
    mlp.dense_4h_to_h HI H
    embed_out VH
""")
DIVIDED = ("llama", "mistral", "mixtral", "phi3", "qwen2", "granite", "smollm3", "olmo", "olmo2", "gpt2", "gpt_neox")
LLAMAS = (*DIVIDED[:-2], "gemma", "gemma2", "gemma3_text", "qwen3", "qwen3_moe")  # whose names are Llama's
KNOWN: dict[Any, Mapping[str, str]] = {  # by model type; without head_dim, heads of DIVIDED share H
    **dict.fromkeys(LLAMAS, LLAMA),
    **dict.fromkeys(("qwen3", "qwen3_moe", "gemma3_text"), LLAMA | HEAD_NORMS),
    "gpt2": GPT2,
    "gpt_neox": NEOX,
}
IN_A_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.\d+\.(.+)$")
EXPERT = re.compile(r"\.experts\.\d+\.")


def mismatches(words: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield tensors whose shape differs from the config.json's, with the expected shape. `words`: the text's keys."""
    kind = words.get("model_type")
    shapes = KNOWN.get(kind, {}) if isinstance(kind, str) else {}
    sizes = _sizes(words, kind in DIVIDED) if shapes else {}
    for tensor in tensors.values():
        found = IN_A_LAYER.search(tensor.name)
        part = EXPERT.sub(".experts.*.", found[1]) if found else ".".join(tensor.name.split(".")[-2:])
        due = [sizes.get(letter) for letter in shapes.get(part, "")]
        if due and None not in due and tensor.shape != tuple(due) and not reads_more_than_text(tensor.name):
            yield tensor, tuple(size for size in due if size is not None)


def _sizes(words: Mapping[str, Any], divided: bool) -> dict[str, int]:
    """Return letter -> size, for the sizes that a config.json gives."""

    def size(*keys: str) -> int | None:
        return next((words[key] for key in keys if type(words.get(key)) is int), None)

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    head, keys, inner = size("head_dim"), size("num_key_value_heads"), size("intermediate_size", "n_inner")
    if head is None and divided and hidden and heads:
        head = hidden // heads
    queries, key_width = heads and head and heads * head, keys and head and keys * head
    found = {
        "H": hidden,
        "Q": queries,
        "K": key_width,
        "A": queries and key_width and queries + 2 * key_width,
        "D": head,
        "I": inner,
        "G": inner and 2 * inner,
        "M": size("moe_intermediate_size"),
        "E": size(*EXPERTS),
        "V": size("vocab_size"),
        "T": hidden and 3 * hidden,
    }
    return {letter: each for letter, each in found.items() if each is not None}
