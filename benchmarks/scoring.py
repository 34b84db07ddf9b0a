#!/usr/bin/env python3
"""Compare scoring with a plain loop over the same windows in time.

    envs/torch/bin/python benchmarks/scoring.py --hidden 256 --layers 4 --vocab 128256

A random model of that shape is made in a temporary folder, and is its own reference. The plain loop calls transformers'
model with all logits of a window at once; on a GPU it takes their negative log-likelihood too, in float32. Each round
times it and then the scoring. On a CPU the ratio is of the process's CPU seconds, which other programs disturb less
than wall time, and memory is the peak of scoring beyond that of the model's body (Linux can reset the peak); on a GPU
the figures are positions a second.

--engine scores an artifact of the model by that engine instead: --model is then a folder that an earlier run wrote, and
--artifact what was built from it.

    envs/torch/bin/python benchmarks/scoring.py --table results/scoring.json results/scoring/*.jsonl

makes the table of docs/FIGURES.md of what was printed.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantmill import engines
from quantmill.common import manifest
from quantmill.metrics.windows import gptq_2048
from quantmill.quality import reference, teacher_forcing
from quantmill.quality.measure import score, score_reference
from quantmill.quality.reference import Reference

HEADERS = 10_000  # bytes of what is kept beside the numbers, at most


def make(folder: Path, options: argparse.Namespace) -> None:
    """Make a random model of the given shape."""
    torch.manual_seed(0)
    heads = options.heads or options.hidden // 64
    config = AutoConfig.for_model(
        options.kind,
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate or 3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=options.kv_heads or heads,
        max_position_embeddings=options.window,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).half().save_pretrained(folder)


def count_anew() -> None:
    """Reset the peak of memory to the current value."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("layers", 4), ("vocab", 128_256), ("window", 2048), ("windows", 2)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    for name in ("intermediate", "heads", "kv-heads"):
        arguments.add_argument(f"--{name}", type=int)
    arguments.add_argument("--kind", default="llama", help="the model's type")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--keep", choices=("states", "logits"), help="what is kept of the reference, if not `auto`")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--model", type=Path, help="a folder for the model, which is kept")
    arguments.add_argument("--engine", default="transformers")
    arguments.add_argument("--artifact", type=Path)
    arguments.add_argument("--table", type=Path, nargs="+", metavar=("OUT", "PRINTED"))
    options = arguments.parse_args()
    if options.table:
        out, *printed = options.table
        lines = [line for path in printed for line in path.read_text().splitlines()]
        out.write_text(json.dumps([row(json.loads(line)) for line in lines]) + "\n")
        return

    ids = np.random.default_rng(0).integers(options.vocab, size=options.window * options.windows).tolist()
    windows = gptq_2048(len(ids), options.window)
    text = teacher_forcing.Text(ids, windows, [float(window.last - window.first) for window in windows], {})
    if options.keep == "states":
        reference.SMALL = 0
    with tempfile.TemporaryDirectory() as temporary:
        model, kept = options.model or Path(temporary, "model"), Path(temporary, "predictions")
        if not model.exists():
            make(model, options)
        source = engines.load("transformers", model, options.device, options.threads)
        started = time.perf_counter()
        keep = "logits" if options.keep == "logits" else "auto"
        score_reference(source, text, kept, options.device, keep)
        written = time.perf_counter() - started
        engine = source
        if options.artifact:
            engine = engines.load(options.engine, options.artifact, options.device, options.threads)
        tokens = [torch.tensor([ids[window.start : window.stop]], device=options.device) for window in windows]
        found = {"positions": text.positions, "kept_bytes": sum(file.stat().st_size for file in kept.iterdir())}
        measure = on_gpu if options.device == "cuda" else on_cpu
        found |= measure(
            source, tokens, lambda: score(engine, text, Reference(kept), options.device == "cuda"), options.rounds
        )
        if options.device == "cuda":
            found["reference_positions_per_second"] = text.positions / written
    print(json.dumps(vars(options) | found, default=str))


def on_cpu(engine: engines.Engine, tokens: list[torch.Tensor], run: Callable, rounds: int) -> dict[str, object]:
    """Return ratios of CPU seconds, and memory in MiB."""
    ratios, memory = [], []
    for _ in range(rounds):
        count_anew()
        with torch.inference_mode():
            for each in tokens:
                engine.model.base_model(input_ids=each, use_cache=False)
        body = manifest.peak_rss_bytes()
        count_anew()
        started = time.process_time()
        run()
        scored = time.process_time()
        memory.append(manifest.peak_rss_bytes() - body)
        with torch.inference_mode():
            for each in tokens:
                engine.model(input_ids=each, use_cache=False)
        plain = time.process_time() - scored
        ratios.append(round((scored - started) / plain, 3))
    return {"ratio": statistics.median(ratios), "ratios": ratios, "memory_mib": max(memory) / 2**20}


def on_gpu(engine: engines.Engine, tokens: list[torch.Tensor], run: Callable, rounds: int) -> dict[str, object]:
    """Return positions a second of the plain loop and of scoring; a round before those that count warms up."""
    plain, scored = [], []
    count = sum(each.shape[1] - 1 for each in tokens)
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.inference_mode():
            losses = []
            for each in tokens:
                logits = engine.model(input_ids=each, use_cache=False).logits[0, :-1].float()
                losses.append(torch.nn.functional.cross_entropy(logits, each[0, 1:], reduction="none"))
            torch.cat(losses).cpu()
        plain.append(count / (time.perf_counter() - started))
        started = time.perf_counter()
        run()
        scored.append(count / (time.perf_counter() - started))
    plain, scored = plain[1:], scored[1:]
    ratios = [ours / theirs for ours, theirs in zip(scored, plain, strict=True)]
    return {
        "plain_per_second": statistics.median(plain),
        "scored_per_second": statistics.median(scored),
        "speed_ratio": statistics.median(ratios),
        "speed_ratios": ratios,
        "gpu_bytes": torch.cuda.max_memory_allocated(),
    }


def row(found: dict[str, Any]) -> dict[str, str]:
    """Return the row of a table for what was printed once."""
    ratios = found.get("speed_ratios") or found["ratios"]
    middle = f"{statistics.median(ratios):.2f}"
    middle += f", {min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
    gpu = found["device"] == "cuda"
    beyond = found["kept_bytes"] - reference.logits_bytes(found["positions"], found["vocab"])  # of logits, a header
    return {
        "model": f"{found['kind']}, {found['hidden']:,} wide, {found['layers']} layers",
        "vocabulary": f"{found['vocab']:,}",
        "engine": found["engine"],
        "kept of the reference": "logits" if 0 <= beyond < HEADERS else "states",
        "window x number": f"{found['window']:,} x {found['windows']}",
        "n": str(len(ratios)),
        "CPU: time": "" if gpu else middle,
        "memory, MiB": "" if gpu else f"{found['memory_mib']:,.0f}",
        "H200: speed": middle if gpu else "",
        "positions/s": f"{found['scored_per_second']:,.0f}" if gpu else "",
        "of the loop": f"{found['plain_per_second']:,.0f}" if gpu else "",
    }


if __name__ == "__main__":
    main()
