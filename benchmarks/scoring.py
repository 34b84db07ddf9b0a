#!/usr/bin/env python3
"""Compare scoring with plain forwards of the same windows in time, and its memory with that of the model's body.

    envs/torch/bin/python benchmarks/scoring.py --hidden 256 --layers 4 --vocab 128256

A random Llama of that shape is made in a temporary folder; the reference's logits are its own, from a file. A plain
forward is transformers' model with all logits of a window at once. The body is the model without its head: memory is
the peak of scoring minus the peak of running the body (Linux can reset the peak). Prints JSON with the ratio of CPU
seconds of each round, which other programs disturb less than wall time.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantmill import engines
from quantmill.common import manifest
from quantmill.metrics.windows import gptq_2048
from quantmill.quality import teacher_forcing
from quantmill.quality.measure import score, score_reference
from quantmill.quality.reference import Reference


def make(folder: Path, options: argparse.Namespace) -> None:
    """Make a random model of the given shape."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64,
        max_position_embeddings=options.window,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).half().save_pretrained(folder)


def count_anew() -> None:
    """Reset the peak of memory to the current value."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("layers", 4), ("vocab", 128_256), ("window", 2048), ("windows", 2)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--keep", choices=("auto", "logits"), default="auto", help="what is kept of the reference")
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()

    ids = np.random.default_rng(0).integers(options.vocab, size=options.window * options.windows).tolist()
    windows = gptq_2048(len(ids), options.window)
    text = teacher_forcing.Text(ids, windows, [float(window.last - window.first) for window in windows], {})
    with tempfile.TemporaryDirectory() as temporary:
        logits = Path(temporary, "predictions")
        make(Path(temporary, "model"), options)
        engine = engines.load("transformers", Path(temporary, "model"), "cpu", options.threads)
        tokens = [torch.tensor([ids[window.start : window.stop]]) for window in windows]
        score_reference(engine, text, logits, "cpu", options.keep)
        ratios, memory = [], []
        for _ in range(options.rounds):
            count_anew()
            with torch.inference_mode():
                for each in tokens:
                    engine.model.base_model(input_ids=each, use_cache=False)
            body = manifest.peak_rss_bytes()
            count_anew()
            started = time.process_time()
            score(engine, text, Reference(logits))
            scored = time.process_time()
            memory.append(manifest.peak_rss_bytes() - body)
            with torch.inference_mode():
                for each in tokens:
                    engine.model(input_ids=each, use_cache=False)
            plain = time.process_time() - scored
            ratios.append(round((scored - started) / plain, 3))
    whole = options.window * options.vocab * 4
    print(
        json.dumps(
            {"ratios": ratios, "plain_seconds": plain, "memory_mib": max(memory) / 2**20, "logits_mib": whole / 2**20}
        )
    )


if __name__ == "__main__":
    main()
