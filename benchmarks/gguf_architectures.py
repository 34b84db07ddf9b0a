#!/usr/bin/env python3
"""Check the architectures that llama.cpp converts and runs correctly, with a tiny random model of each.

    envs/llama_cpp/bin/python benchmarks/gguf_architectures.py [NAME...] [--write docs/GGUF.md]

Each is a model of two or four layers with random weights, the demo's tokenizer and the demo's text. It is converted to
float16 and quantized to q8_0 as the workflow does, by the same programs, and the gate holds both against transformers
with the same weights. Prints a table; --write puts it into a page between its two marks, or only the rows that are
named. Run `make llama.cpp` first.
"""

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "scripts"))
os.environ.setdefault("QUANTMILL_LLAMA_CPP", str(REPO / "artifacts/libraries/llama.cpp"))

import torch  # noqa: E402
import transformers  # noqa: E402

from quantmill import engines  # noqa: E402
from quantmill.checkpoint import gguf_file  # noqa: E402
from quantmill.llamacpp import files  # noqa: E402

MARKS = "<!-- architectures: by benchmarks/gguf_architectures.py -->", "<!-- end -->"
NEW_TOKENS = 16
IDS = {"vocab_size": 2048, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1}
SHAPE = IDS | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"max_position_embeddings": 512}
GROUPED = SHAPE | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
WINDOW = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
SIX = {"num_hidden_layers": 6, "sliding_window": 64}  # of which Gemma's last is not sliding
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64}
DEEPSEEK = SHAPE | LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
DEEPSEEK |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
OLDER = IDS | {"n_embd": 256, "n_head": 4, "n_layer": 2, "n_positions": 512}
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> transformers' config class and what it is given
    "Llama": ("LlamaConfig", GROUPED),
    "Llama, tied": ("LlamaConfig", GROUPED | {"tie_word_embeddings": True}),
    "Llama 3, scaled": ("LlamaConfig", GROUPED | {"rope_parameters": LLAMA_3}),
    "Mistral, window": ("MistralConfig", GROUPED | {"sliding_window": 64}),
    "Qwen2": ("Qwen2Config", GROUPED | {"vocab_size": 2304}),  # transformers adds tokens of its own to its tokenizers
    "Qwen3": ("Qwen3Config", GROUPED | {"head_dim": 64}),
    "Qwen3-MoE": ("Qwen3MoeConfig", EXPERTS | {"num_experts": 4, "head_dim": 64}),
    "Mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "Gemma 2": ("Gemma2Config", GROUPED | {"head_dim": 64, "query_pre_attn_scalar": 64} | WINDOW),
    "Gemma 3": ("Gemma3TextConfig", GROUPED | SIX | {"head_dim": 64, "query_pre_attn_scalar": 64}),
    "Phi-3": ("Phi3Config", GROUPED | {"sliding_window": None}),
    "gpt-oss": ("GptOssConfig", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64} | WINDOW),
    "OLMo 2": ("Olmo2Config", GROUPED),
    "GLM-4": ("Glm4Config", GROUPED | {"head_dim": 64}),
    "SmolLM3": ("SmolLM3Config", GROUPED),
    "Granite": ("GraniteConfig", GROUPED | {"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
    "DeepSeek-V2": ("DeepseekV2Config", DEEPSEEK | {"topk_method": "greedy"}),
    "DeepSeek-V3": ("DeepseekV3Config", DEEPSEEK),
    "StableLM": ("StableLmConfig", GROUPED),
    "StarCoder2": ("Starcoder2Config", GROUPED | {"sliding_window": None}),
    "GPT-2": ("GPT2Config", OLDER),
    "GPT-NeoX": ("GPTNeoXConfig", SHAPE),
}


def write_model(name: str, folder: Path) -> None:
    """Write a random model with the demo's tokenizer, in the form of a published one."""
    kind, words = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**words)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, value in model.named_parameters():
            scale = 0.3 if value.ndim == 1 else 0.08
            if key.endswith(ROUTERS):  # apart, or rounding would send tokens to other experts
                scale *= 5
            value.copy_(torch.randn_like(value) * scale + ("norm" in key and not kind.startswith("Gemma")))
    model.to(torch.float16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPO / "demo" / file, folder)


def run(program: str, *arguments: object) -> None:
    """Run a program in this process, because its imports take long. Raises `RuntimeError` with its last line."""
    errors, before = io.StringIO(), sys.argv
    sys.argv = ["quantmill", program, *map(str, arguments)]
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
            runpy.run_path(str(REPO / "scripts/quantmill"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            lines = [line for line in errors.getvalue().splitlines() if line.strip()]
            raise RuntimeError(str(end.code) if isinstance(end.code, str) else (lines or ["no message"])[-1]) from None
    finally:
        sys.argv = before


def check(name: str, work: Path) -> dict[str, Any]:
    """Build and check one architecture; return `refused`, or both artifacts' distances from transformers in nats."""
    source, safe = work / "source", work / "safetensors"
    try:
        write_model(name, work / "published")
        run("fetch.link", work / "published", source)
        run("checkpoint.to_safetensors", source, safe)
        text = REPO / "config/evaluation.txt"
        run("tokens.tokenize_texts", safe, text, work / "evaluation.json", "--as", "evaluation")
        run("gate.expected", source, work / "expected.json", "--evaluation", work / "evaluation.json")
    except Exception as error:  # transformers raises anything for a config that it refuses
        return {"refused": f"transformers: {error}"}
    gate = [
        "--gate-reference",
        work / "expected.json",
        "--gate-evaluation",
        work / "evaluation.json",
        "--device",
        "cpu",
    ]
    gate += ["--layout", "gguf", "--engine", "llama_cpp"]
    found: dict[str, Any] = {}
    try:
        texts = ["--evaluation", work / "evaluation.json", "--text", text]
        f16, q8_0 = ([f"--parameters={json.dumps({'type': kind})}"] for kind in ("f16", "q8_0"))
        run("build.gguf", safe, work / "f16", *f16, "--name", name, *texts, *gate)
        run("build.gguf", safe, work / "q8_0", *q8_0, "--base", work / "f16", *gate)
        for kind in ("f16", "q8_0"):
            faithful = json.loads((work / kind / "quantmill.json").read_text())["gate"]["faithful"]
            found[kind] = faithful.get("divergence", faithful.get("unchecked"))
        engine = engines.load("llama_cpp", work / "q8_0", "cpu", 1)
        ids = json.loads((work / "evaluation.json").read_text())["ids"][:32]
        found["tokens"] = len(list(engine.decode([ids], NEW_TOKENS)))
        found["types"] = files.types(gguf_file.read_all(files.first(work / "q8_0")))
        engine.close()
    except RuntimeError as error:
        found["refused"] = str(error)
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """Return one line of the table."""
    if "refused" in found:
        reason = re.sub(r"/\S*/", "", found["refused"]).replace("|", "\\|").removeprefix("error: ")
        return f"| {name} | refused: {reason} | | |"
    cells = [
        f"{found[kind]:.1e}" if isinstance(found[kind], float) else f"not compared: {found[kind]}"
        for kind in ("f16", "q8_0")
    ]
    return f"| {name} | {' | '.join(cells)} | {found['tokens']} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", help="of architectures; default: all")
    arguments.add_argument("--write", type=Path, help="page to put the table into")
    options = arguments.parse_args()
    lines = ["| architecture | `gguf-f16`, nats | `gguf-q8_0`, nats | tokens decoded |", "|---|---|---|---|"]
    for name in options.names or MODELS:
        with tempfile.TemporaryDirectory() as work:
            lines.append(row(name, check(name, Path(work))))
        print(lines[-1], flush=True)
    if options.write:
        before, _, rest = options.write.read_text(encoding="utf-8").partition(MARKS[0])
        table, _, after = rest.partition(MARKS[1])
        made = {line.split(" | ")[0]: line for line in lines}
        kept = table.strip().splitlines() if options.names else lines  # the rows of the others stay as they are
        table = "\n".join(made.get(line.split(" | ")[0], line) for line in kept)
        options.write.write_text(f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
