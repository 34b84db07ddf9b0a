#!/usr/bin/env python3
"""Time conversions to CTranslate2 in a stream against `cp` of the same checkpoint and CTranslate2's own converter.

    python3 benchmarks/ct2.py FOLDER [--config config/examples/llama-1.1b.json] [--runs 5]

Makes a checkpoint of random float16 weights in FOLDER. Then runs in turn, RUNS times: cp -r, and each conversion in a
process of its own, with one thread, which has imported the libraries before it is timed. Neither hashes nor flushes.
"Loaded" is the part of the seconds before the first byte: config, tokenizer and the model's modules, and the weights in
CTranslate2's own way. Memory is the peak beyond that of the imports, files in memory included. FOLDER needs room for
three times the checkpoint, and the machine memory for three times. Needs envs/torch.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TORCH = REPO / "envs/torch/bin/python"
CONVERT = """
import json, sys, time
sys.path.insert(0, 'scripts')
import torch, transformers
from ctranslate2.converters import TransformersConverter
from quantmill.build import ct2
from quantmill.common.manifest import peak_rss_bytes

torch.set_num_threads(1)
transformers.logging.disable_progress_bar()
way, source, target, quantization = sys.argv[1:]
converter = {'stream': ct2.Converter, 'own': TransformersConverter}[way]
made = converter(source)
before, started = peak_rss_bytes(), time.perf_counter()
spec = made._load()
loaded = time.perf_counter() - started
made._load = lambda: spec
made.convert(target, quantization=quantization)
seconds = time.perf_counter() - started
print(json.dumps({'seconds': seconds, 'loaded': loaded, 'mib': (peak_rss_bytes() - before) / 2**20}))
"""
QUANTIZATIONS = ("float16", "int8")


def run(way: str, source: Path, target: Path, quantization: str) -> dict[str, float]:
    """Convert or copy to a new folder; return seconds, and MiB of a conversion."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["sync"], check=True)
    if way == "cp":
        started = time.perf_counter()
        subprocess.run(["cp", "-r", source, target], check=True)
        return {"seconds": time.perf_counter() - started, "loaded": 0, "mib": 0}
    command = [TORCH, "-P", "-c", CONVERT, way, source, target, quantization]
    return json.loads(subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", type=Path, default=REPO / "config/examples/llama-1.1b.json")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    source, target = options.folder / "source", options.folder / "target"
    make = [TORCH, "scripts/quantmill", "fetch.random_weights", options.config.resolve(), source.resolve()]
    subprocess.run(make, cwd=REPO, check=True)
    results = defaultdict(list)
    for _ in range(options.runs):
        for quantization in QUANTIZATIONS:
            for way in ("cp", "stream", "own"):
                name = "cp" if way == "cp" else f"{quantization}, {way}"
                results[name].append(run(way, source.resolve(), target.resolve(), quantization))
    cp = statistics.median(each["seconds"] for each in results["cp"])
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    print(f"{nbytes / 1e9:.2f} GB; runs: {options.runs}")
    print(f"{'':18}{'median s':>9}{'range':>14}{'x cp':>7}{'loaded':>8}{'MiB':>7}")
    for name, runs in results.items():
        seconds = [each["seconds"] for each in runs]
        median, loaded, mib = (statistics.median(each[key] for each in runs) for key in ("seconds", "loaded", "mib"))
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        print(f"{name:18}{median:9.2f}{spread:>14}{median / cp:7.2f}{loaded:8.2f}{mib:7.0f}")
    shutil.rmtree(target)
    shutil.rmtree(source)


if __name__ == "__main__":
    main()
