#!/usr/bin/env python3
"""Compare measured rows with llama.cpp's llama-bench, on the same files and device; print a table.

    python benchmarks/llama_bench.py [artifacts/MODEL/latency/CELL.json…] [--runs 5]

Without names, all rows of the engine llama_cpp in ./artifacts. llama-bench decodes as many tokens as the row did,
without a prompt, and reads a prompt of 512 tokens. So its decoding is compared with the row's TPOT and with its median
step: on a GPU the first steps after each prompt are slower, and llama-bench has no prompt between its runs. Its prompt
is compared with the row's TTFT of 512 tokens, if there is one. QUANTMILL_LLAMA_CPP names a folder of llamacpp.compile.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from quantmill import devices, llamacpp
from quantmill.llamacpp import files

PROMPT = 512
FLAGS = {"type_k": "-ctk", "type_v": "-ctv", "flash_attn": "-fa", "n_batch": "-b", "n_ubatch": "-ub"}
HEADINGS = ("model", "cell", "tokens/s after the first", "median step", "llama-bench", "ratio", "of the median step")
HEADINGS += (f"{PROMPT} tokens, ms", "llama-bench")


def bench(artifact: Path, row: dict[str, Any], runs: int) -> tuple[float, float]:
    """Run llama-bench on a row's file; return tokens per second, and milliseconds of the prompt."""
    command = [llamacpp.folder() / "bin/llama-bench", "-m", files.first(artifact), "-o", "json", "-r", runs]
    command += ["-p", PROMPT, "-n", row["protocol"]["new_tokens"]]
    command += [word for name, value in row["options"].items() for word in (FLAGS[name], value)]
    if row["device"]["device"] == "cpu":
        command += ["-t", row["device"]["threads"], "-dev", "none"]
    result = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
    prompt, generation = json.loads(result.stdout)
    return generation["avg_ts"], 1000 * PROMPT / prompt["avg_ts"]


def cells(path: Path, runs: int) -> list[str]:
    """Return the table's cells for a latency result."""
    row = json.loads(path.read_text(encoding="utf-8"))
    model = path.parents[1]
    theirs, their_prompt = bench(model / path.stem.partition("@")[0], row, runs)
    ours, step = (1000 / row["summary"][name] for name in ("tpot_ms_p50", "itl_ms_p50"))
    prompt = next((each.get("ttft_ms_p50") for each in row["lengths"] if each["tokens"] == PROMPT), None)
    speeds = [f"{each:.1f}" for each in (ours, step, theirs)] + [f"{each / theirs:.3f}" for each in (ours, step)]
    return [model.name, f"`{path.stem}`", *speeds, f"{prompt:.1f}" if prompt else "", f"{their_prompt:.1f}"]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("rows", type=Path, nargs="*", help="latency results of the engine llama_cpp")
    arguments.add_argument("--runs", type=int, default=5, help="runs of llama-bench, which reports their mean")
    options = arguments.parse_args()
    rows = options.rows or sorted(Path("artifacts").glob("*/latency/gguf-*.json"))
    devices.resolve("auto")  # one card alone, as the rows had
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for path in rows:
        print(f"| {' | '.join(cells(path, options.runs))} |", flush=True)


if __name__ == "__main__":
    main()
