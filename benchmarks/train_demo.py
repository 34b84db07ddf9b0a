#!/usr/bin/env python3
"""Train the demo model that the repository ships: a small, real Llama.

    python benchmarks/train_demo.py war-and-peace.txt tinyshakespeare.txt --out demo

The corpus is the given public-domain texts plus the docstrings of the running Python's standard library. The result is
a Llama checkpoint of 5.9 million parameters in float16, written the way many older models are published: sharded
`pytorch_model-0000x-of-0000y.bin` files with an index. A small vocabulary and seven narrow layers leave little
redundancy in its weights, so that 4-bit quantization has a visible cost.

Needs torch, transformers and tokenizers (the `torch` environment); minutes on a GPU, hours on a CPU.
"""

import argparse
import ast
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

SHARDS = 3
CONTEXT = 512  # tokens
HELD_OUT = 0.02  # share of every document's end that is never trained on


def unwrap(text: str) -> str:
    """Join hard-wrapped lines, so that a newline means a new paragraph as it does in the evaluation text."""
    paragraphs = text.replace("\r\n", "\n").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def docstrings() -> Iterator[str]:
    """Return the docstrings of at least 80 characters in the standard library, without its tests."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(stdlib.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "lib2to3"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # templates and deliberately broken samples
        for node in ast.walk(tree):
            if isinstance(node, documented):
                doc = ast.get_docstring(node)
                if doc and len(doc) >= 80:
                    yield doc


def read_corpus(paths: list[Path]) -> list[str]:
    """Return the documents: one per given file (prose unwrapped, verse as it is), and one of all docstrings."""
    documents = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line]
        wrapped = sum(len(line) > 55 for line in lines) > len(lines) / 2
        documents.append(unwrap(text) if wrapped else text)
    documents.append("\n\n".join(docstrings()))
    return documents


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE that puts `<s>` before each text, like Llama's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            ),
        ]
    )
    return tokenizer


def build_model(arguments: argparse.Namespace) -> LlamaForCausalLM:
    """Make a Llama with matrix dimensions that are multiples of 128, grouped-query attention and its own lm_head."""
    config = LlamaConfig(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:  # residual dropout, which Llama does not have; the weights keep no trace of it
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.register_forward_hook(
                lambda module, _, output: torch.nn.functional.dropout(output, arguments.dropout, module.training)
            )
    return model


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, windows: torch.Tensor) -> float:
    """Return the mean NLL per token, in nats, over held-out windows [n, CONTEXT]."""
    model.eval()
    total = sum(float(model(input_ids=batch, labels=batch).loss) * len(batch) for batch in windows.split(32))
    model.train()
    return total / len(windows)


def train(model: LlamaForCausalLM, streams: list[torch.Tensor], arguments: argparse.Namespace) -> float:
    """Train by AdamW with warm-up and cosine; keep the weights of the lowest validation loss, and return that loss."""
    device = arguments.device
    train_ids, held_out = [], []
    for stream in streams:
        cut = int(len(stream) * (1 - HELD_OUT))
        train_ids.append(stream[:cut])
        held_out += list(stream[cut:].split(CONTEXT)[:-1])
    ids = torch.cat(train_ids).to(device)
    held_out_windows = torch.stack(held_out).to(device)
    steps_an_epoch = len(ids) // (arguments.batch * CONTEXT)
    steps = steps_an_epoch * arguments.epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    best, best_weights, started = math.inf, {}, time.monotonic()
    offsets = torch.arange(CONTEXT, device=device)
    for step in range(steps):
        for group in optimizer.param_groups:
            warm_up = min(1.0, (step + 1) / 100)
            group["lr"] = arguments.lr * warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        starts = torch.randint(len(ids) - CONTEXT, (arguments.batch, 1), device=device)
        batch = ids[starts + offsets]
        batch[:, 0] = model.config.bos_token_id  # a window always begins as a text does
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % steps_an_epoch == 0:
            held = validation_loss(model, held_out_windows)
            if held < best:
                best = held
                best_weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
            print(
                f"epoch {(step + 1) // steps_an_epoch:3d}  train {loss.item():.3f}  held out {held:.3f}"
                f"  {time.monotonic() - started:.0f} s",
                file=sys.stderr,
            )
    model.load_state_dict(best_weights)
    return best


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write float16 .bin shards with an index, the config in the spellings of transformers 4 and 5, the tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().to("cpu", torch.float16).contiguous() for name, value in model.state_dict().items()}
    total = sum(value.nbytes for value in state.values())
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, value in state.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) + value.nbytes / 2 > total / SHARDS:
            shards.append({})
        shards[-1][name] = value
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"pytorch_model-{number:05d}-of-{len(shards):05d}.bin"
        torch.save(shard, out / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    config = {
        key: getattr(model.config, key)
        for key in (
            *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
            *("hidden_act", "initializer_range", "attention_bias", "mlp_bias", "attention_dropout"),
            *("tie_word_embeddings", "bos_token_id", "eos_token_id", "use_cache"),
        )
    }
    # transformers 4 reads rope_theta and torch_dtype, transformers 5 rope_parameters and dtype
    rope = {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = {"architectures": ["LlamaForCausalLM"]} | config | rope | {"torch_dtype": "float16", "dtype": "float16"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 1}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


@torch.no_grad()
def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str) -> str:
    """Return a greedy continuation of 60 tokens."""
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    for _ in range(60):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return tokenizer.decode(ids[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="public-domain text files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=640)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="windows of 512 tokens")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    documents = read_corpus(arguments.texts)
    tokenizer = train_tokenizer(documents, arguments.vocab_size)
    streams = [torch.tensor(tokenizer.encode(document).ids) for document in documents]
    model = build_model(arguments).to(arguments.device)
    print(
        f"{sum(map(len, documents)):,} characters, {sum(map(len, streams)):,} tokens, "
        f"{model.num_parameters():,} parameters",
        file=sys.stderr,
    )
    best = train(model, streams, arguments)
    save(model, tokenizer, arguments.out)
    model.eval()
    print(f"held out: {best:.4f} nats a token, perplexity {math.exp(best):.1f}")
    for prompt in ("The old captain stood at the window", "Return the", "MENENIUS:\nWhat news"):
        print("---", sample(model, tokenizer, prompt), sep="\n")


if __name__ == "__main__":
    main()
