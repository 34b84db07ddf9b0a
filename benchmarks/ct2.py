#!/usr/bin/env python3
"""Time conversions to CTranslate2 in a stream against `cp` of the same checkpoint and CTranslate2's own converter.

    envs/torch/bin/python benchmarks/ct2.py results/ct2.json FOLDER CONFIG.json [--runs 5]

Makes checkpoints of random float16 weights in FOLDER: of CONFIG's model, and of one with twice as many layers, which is
converted to float16 alone. Runs each conversion after a `cp -r`, in turn, RUNS times, and CTranslate2's own converter,
which holds the model, once. A conversion has a process of its own, with one thread. Its time begins after a conversion
of a tiny model, which imports what the libraries import when they need it. Nothing is hashed or flushed, and the input
is in memory. Writes the rows of a table as JSON. FOLDER needs room for twice the larger checkpoint. Needs Linux.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import torch
import transformers
from ctranslate2.converters import TransformersConverter

from quantmill.build import ct2
from quantmill.common.atomic import write_json
from quantmill.common.manifest import peak_rss_bytes

REPO = Path(__file__).resolve().parents[1]
WAYS = {"in a stream": ct2.Converter, "by its own converter": TransformersConverter}
Figures = dict[str, float]


def prepare(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    os.sync()


def copy(source: Path, target: Path) -> Figures:
    """Copy a checkpoint; return wall and CPU seconds."""
    prepare(target)
    started = time.perf_counter()
    process = os.posix_spawnp("cp", ["cp", "-r", source, target], os.environ)
    _, status, usage = os.wait4(process, 0)
    if status:
        sys.exit(f"error: {source}: cp failed")
    return {"seconds": time.perf_counter() - started, "cpu": usage.ru_utime + usage.ru_stime}


def convert(quantization: str, way: str, source: Path, target: Path) -> Figures:
    """Convert a checkpoint; return wall and CPU seconds, and the peak of this process's memory in bytes."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    prepare(target)
    WAYS[way](str(source.with_name("tiny"))).convert(str(target), quantization=quantization)
    prepare(target)
    before, started, cpu = peak_rss_bytes(), time.perf_counter(), time.process_time()
    WAYS[way](str(source)).convert(str(target), quantization=quantization)
    seconds, cpu, peak = time.perf_counter() - started, time.process_time() - cpu, peak_rss_bytes()
    return {"seconds": seconds, "cpu": cpu, "peak": peak, "more": peak - before}


def make(config: Path, target: Path) -> None:
    """Write a checkpoint of random weights."""
    subprocess.run([sys.executable, REPO / "scripts/quantmill", "fetch.random_weights", config, target], check=True)


def compare(folder: Path, config: Path, cases: dict[tuple[str, str], int]) -> list[dict[str, str]]:
    """Return the rows of one model. `cases`: how often each quantization is made in each way."""
    source, target = folder / "source", folder / "target"
    make(config, source)
    size = sum(path.stat().st_size for path in source.iterdir()) / 1e9
    copies: dict[str, list[Figures]] = defaultdict(list)
    conversions: dict[str, list[Figures]] = defaultdict(list)
    for number in range(max(cases.values())):
        for case in [case for case, count in cases.items() if number < count]:
            copies[", ".join(case)].append(copy(source, target))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                conversions[", ".join(case)].append(pool.apply(convert, (*case, source, target)))
    shutil.rmtree(target)
    shutil.rmtree(source)
    return [
        {
            "float16, GB": f"{size:.2f}",
            "what": name,
            "n": str(len(found)),
            "s": middle([each["seconds"] for each in found]),
            "x `cp -r`": middle(ratios(found, copies[name], "seconds")),
            "CPU, x that of `cp -r`": middle(ratios(found, copies[name], "cpu")),
            "peak, MB": megabytes(found, "peak"),
            "of these beyond the libraries": megabytes(found, "more"),
        }
        for name, found in conversions.items()
    ]


def ratios(conversions: list[Figures], copies: list[Figures], key: str) -> list[float]:
    return [each[key] / copied[key] for each, copied in zip(conversions, copies, strict=True)]


def middle(values: list[float]) -> str:
    """Return the median, and the range of several values."""
    spread = f", {min(values):.2f} to {max(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"


def megabytes(conversions: list[Figures], key: str) -> str:
    return f"{max(each[key] for each in conversions) / 1e6:,.0f}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("config", type=Path)
    arguments.add_argument("--runs", type=int, default=5)
    options = arguments.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    shape = json.loads(options.config.read_text())
    deeper = shape | {"num_hidden_layers": 2 * shape["num_hidden_layers"]}
    tiny = shape | {"num_hidden_layers": 1, "hidden_size": 2 * shape["num_attention_heads"], "intermediate_size": 64}
    for name, words in {"deeper": deeper, "tiny": tiny}.items():
        (options.folder / f"{name}.json").write_text(json.dumps(words))
    make(options.folder / "tiny.json", options.folder / "tiny")
    streams = {(quantization, "in a stream"): options.runs for quantization in ("float16", "int8")}
    rows = compare(options.folder, options.config, streams | {("float16", "by its own converter"): 1})
    rows += compare(options.folder, options.folder / "deeper.json", {("float16", "in a stream"): options.runs})
    write_json(options.out, rows)


if __name__ == "__main__":
    main()
