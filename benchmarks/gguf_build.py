#!/usr/bin/env python3
"""Compare time and memory of building GGUF files with llama.cpp's own programs; print a Markdown table.

    envs/tools/bin/python benchmarks/gguf_build.py SAFETENSORS FOLDER [--rounds 3] [--type q4_k_m] [--limit-mb 1000]

SAFETENSORS is an artifact of random weights (`artifacts/MODEL/safetensors`), so that only conversion and quantization
take time. Each round runs our program and theirs. Memory is that of the processes without cached file pages, which
Linux can reclaim. --limit-mb limits both together; it needs root and Linux's control groups.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from quantmill.devices import processes

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path(os.environ.get("QUANTMILL_LLAMA_CPP", ROOT / "artifacts/libraries/llama.cpp")).absolute()
PYTHON = ROOT / "envs/llama_cpp/bin/python"
GROUP = Path("/sys/fs/cgroup/memory/quantmill-benchmark")
SAMPLE = 0.02  # seconds


def run(command: list[object], limit_mb: int | None) -> tuple[float, float]:
    """Run a command; return seconds, and peak MB of its processes without cached file pages."""
    before: list[str] = []
    if limit_mb:
        GROUP.mkdir(exist_ok=True)
        (GROUP / "memory.limit_in_bytes").write_text(str(limit_mb * 10**6))
        before = ["sh", "-c", f'echo $$ > {GROUP}/cgroup.procs; exec "$@"', "sh"]
    environment = os.environ | {"QUANTMILL_LLAMA_CPP": str(LIBRARY), "PYTHONPATH": str(ROOT / "scripts")}
    started, most = time.monotonic(), 0
    process = subprocess.Popen(
        [*before, *map(str, command)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while process.poll() is None:
        most = max(most, sum(anonymous(pid) for pid in processes.tree([process.pid])))
        time.sleep(SAMPLE)
    seconds = time.monotonic() - started
    if process.returncode:
        sys.exit(f"{command}: exit code {process.returncode}: {process.stderr.read().decode()[-500:]}")
    return seconds, most / 1e6


def anonymous(pid: int) -> int:
    """Return the anonymous memory of a process in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def typed(kind: str) -> str:
    """Return the flag of build.gguf that names a type."""
    return f"--parameters={json.dumps({'type': kind})}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("source", type=Path)
    arguments.add_argument("folder", type=Path, help="for temporary files; removed afterwards")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--type", default="q4_k_m")
    arguments.add_argument("--limit-mb", type=int)
    options = arguments.parse_args()
    threads = len(os.sched_getaffinity(0))
    base, file = options.folder / "f16", options.folder / "theirs.gguf"
    ours = [PYTHON, ROOT / "scripts/quantmill", "build.gguf", options.source]
    convert = [
        PYTHON,
        ROOT / "scripts/quantmill",
        "llamacpp.convert",
        "none",
        options.source,
        "--outfile",
        file,
        "--outtype",
        "f16",
    ]
    quantize = [LIBRARY / "bin/llama-quantize", base / "model.gguf", file, options.type, threads]
    jobs = {
        "f16": ([*ours, base, typed("f16")], convert),
        options.type: ([*ours, options.folder / "q", typed(options.type), "--base", base], quantize),
    }
    options.folder.mkdir()
    print("| file | seconds | by hand | ratio | MB held | by hand |\n| --- | --- | --- | --- | --- | --- |")
    for name, commands in jobs.items():
        found: tuple[list[tuple[float, float]], ...] = [], []
        for _ in range(options.rounds):
            for place, command in enumerate(commands):
                shutil.rmtree(options.folder / "q", ignore_errors=True)
                if place == 0 and name == "f16":
                    shutil.rmtree(base, ignore_errors=True)
                file.unlink(missing_ok=True)
                found[place].append(run(command, options.limit_mb))
                file.unlink(missing_ok=True)
        seconds = [statistics.median(each for each, _ in runs) for runs in found]
        held = [max(each for _, each in runs) for runs in found]
        ratios = [mine / theirs for (mine, _), (theirs, _) in zip(*found, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"| {name} | {seconds[0]:.1f} | {seconds[1]:.1f} | {spread} | {held[0]:.0f} | {held[1]:.0f} |", flush=True
        )
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
