#!/usr/bin/env python3
"""Time conversions to CTranslate2 in a stream against `cp` of the same checkpoint and CTranslate2's own converter.

    python3 benchmarks/ct2.py results/ct2.json FOLDER CONFIG.json [--runs 5]

Makes checkpoints of random float16 weights in FOLDER: of CONFIG's model, and of one with twice as many layers. Then
runs each conversion after a `cp -r`, in turn, RUNS times. A conversion has a process of its own, with one thread, which
has imported the libraries before it is timed. Nothing is hashed or flushed, and the input is in memory. CTranslate2's
own converter does not get the larger checkpoint, which it would hold. Writes the rows of a table as JSON. FOLDER needs
room for twice the larger checkpoint. Needs Linux and envs/torch.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from quantmill.common.atomic import write_json

REPO = Path(__file__).resolve().parents[1]
TORCH = REPO / "envs/torch/bin/python"
CONVERT = """
import json, pathlib, sys, time
sys.path.insert(0, 'scripts')
import torch, transformers
from ctranslate2.converters import TransformersConverter
from quantmill.build import ct2
from quantmill.common.manifest import peak_rss_bytes

torch.set_num_threads(1)
transformers.logging.disable_progress_bar()
way, source, target, quantization, out = sys.argv[1:]
converter = {'stream': ct2.Converter, 'own': TransformersConverter}[way]
before, started, cpu = peak_rss_bytes(), time.perf_counter(), time.process_time()
converter(source).convert(target, quantization=quantization)
result = {'seconds': time.perf_counter() - started, 'cpu': time.process_time() - cpu, 'peak': peak_rss_bytes()}
pathlib.Path(out).write_text(json.dumps(result | {'more': result['peak'] - before}))
"""
QUANTIZATIONS = ("float16", "int8")


def spawn(command: list[object]) -> dict[str, float]:
    """Run a command; return its wall and CPU seconds. Exits if it fails."""
    started = time.perf_counter()
    process = os.posix_spawnp(str(command[0]), [str(part) for part in command], os.environ)
    _, status, usage = os.wait4(process, 0)
    if status:
        sys.exit(f"error: {command} failed")
    return {"seconds": time.perf_counter() - started, "cpu": usage.ru_utime + usage.ru_stime}


def measure(folder: Path, command: list[object]) -> dict[str, float]:
    """Run a command that writes `target`; return what it writes to `out`, else its seconds."""
    shutil.rmtree(folder / "target", ignore_errors=True)
    (folder / "out").unlink(missing_ok=True)
    os.sync()
    found = spawn(command)
    return json.loads((folder / "out").read_text()) if (folder / "out").exists() else found


def compare(folder: Path, config: Path, ways: tuple[str, ...], rounds: int) -> list[dict[str, str]]:
    """Return the rows of one model."""
    source, target = folder / "source", folder / "target"
    spawn([TORCH, "scripts/quantmill", "fetch.random_weights", config, source])
    size = sum(path.stat().st_size for path in source.iterdir()) / 1e9
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    copies: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(rounds):
        for quantization in QUANTIZATIONS:
            for way in ways:
                name = f"{quantization}, {'in a stream' if way == 'stream' else 'by its own converter'}"
                copies[name].append(measure(folder, ["cp", "-r", source, target]))
                command = [TORCH, "-P", "-c", CONVERT, way, source, target, quantization, folder / "out"]
                runs[name].append(measure(folder, command))
    shutil.rmtree(target)
    shutil.rmtree(source)
    return [
        {
            "float16, GB": f"{size:.2f}",
            "what": name,
            "n": str(rounds),
            "s": middle([run["seconds"] for run in found]),
            "x `cp -r`": middle(ratios(found, copies[name], "seconds")),
            "CPU, x that of `cp -r`": middle(ratios(found, copies[name], "cpu")),
            "peak, MB": megabytes(found, "peak"),
            "of these beyond the libraries": megabytes(found, "more"),
        }
        for name, found in runs.items()
    ]


def ratios(runs: list[dict[str, float]], copies: list[dict[str, float]], key: str) -> list[float]:
    return [run[key] / copy[key] for run, copy in zip(runs, copies, strict=True)]


def middle(values: list[float]) -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):.2f}, {min(values):.2f} to {max(values):.2f}"


def megabytes(runs: list[dict[str, float]], key: str) -> str:
    return f"{max(run[key] for run in runs) / 1e6:,.0f}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("config", type=Path)
    arguments.add_argument("--runs", type=int, default=5)
    options = arguments.parse_args()
    out, folder, config = (path.resolve() for path in (options.out, options.folder, options.config))
    os.chdir(REPO)
    folder.mkdir(parents=True, exist_ok=True)
    deeper = json.loads(config.read_text())
    deeper["num_hidden_layers"] *= 2
    (folder / "deeper.json").write_text(json.dumps(deeper))
    rows = compare(folder, config, ("stream", "own"), options.runs)
    rows += compare(folder, folder / "deeper.json", ("stream",), options.runs)
    write_json(out, rows)


if __name__ == "__main__":
    main()
