#!/usr/bin/env python3
"""Time quantizers on a model of random weights: with all of a GPU, with little of it, and on two; and GPTQ's steps.

    python benchmarks/quantizers_large.py FOLDER OUT.json [--config config/examples/llama-2-7b.json] [--layers 32]
        [--samples 128] [--length 2048] [--gb 6] [--case gptq:free …] [--limit SECONDS] [--python gptqmodel=python3 …]
    python benchmarks/quantizers_large.py --table CASES.json STEPS.json OUT.json…

A case is TOOL:WAY. Tools: gptq, llmcompressor, autoround. Ways: `free`, all of one GPU; `limited`, --gb of it; `two`,
two GPUs; `each`, each placement of the tool on one GPU, forced. Options follow after another colon, NAME=VALUE, divided
by commas: variables of the environment (GPTQMODEL_CPU_WORKERS=2), `resume=no` (gptqmodel saves no progress), and
`device=cpu`. So gptq:free and gptq:free:resume=no show what a setting costs, and whether it changes the bytes.

FOLDER gets the model, the logs and, one after another, the artifacts. OUT.json has a record for each case, also of one
that fails or exceeds --limit: seconds, placement and peak memory from the manifest, the most memory in use on a GPU
(nvidia-smi, every 0.2 s), seconds of its steps, the SHA-256 of the weights, versions. It is written after each case, so
a run that is stopped keeps what it has.

--table makes two tables of docs/FIGURES.md: the cases, and the seconds of GPTQ's steps. What the steps and regions are,
benchmarks/timed_build.py says.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import numpy as np  # noqa: E402

ENVIRONMENTS = {"gptq": "gptqmodel", "llmcompressor": "quantizers", "autoround": "quantizers"}
PARAMETERS: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 128, "sym": True, "desc_act": False, "damp_percent": 0.05},
    "llmcompressor": {"scheme": "W4A16", "group_size": 128},
    "autoround": {"layout": "gptq", "bits": 4, "group_size": 128, "sym": True, "iters": 200},
}
LADDERS = {"gptq": "GPTQMODEL", "llmcompressor": "LLM_COMPRESSOR", "autoround": "AUTOROUND"}
WAYS = ("free", "limited", "two", "each")
CASES = [f"{tool}:{way}" for way in WAYS[:3] for tool in PARAMETERS]
WORKER = ROOT / "benchmarks/timed_build.py"


def make_model(folder: Path, config: Path, layers: int | None) -> Path:
    """Make the checkpoint of random weights, and the random ids of two texts, unless they are there."""
    model = folder / f"model-{layers or 'all'}"
    if not model.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        words = json.loads(config.read_text(encoding="utf-8"))
        cut = folder / "config.json"
        cut.write_text(json.dumps(words | ({"num_hidden_layers": layers} if layers else {})), encoding="utf-8")
        command = [sys.executable, ROOT / "scripts/quantmill", "fetch.random_weights", cut, model]
        subprocess.run([str(each) for each in command], check=True)
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    for number, name in enumerate(("calibration", "evaluation")):
        ids = np.random.default_rng(number).integers(4, vocabulary, 2**19 if name == "calibration" else 2**12)
        content = {"ids": ids.tolist(), "text_sha256": name, "context": None}
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return model


def expand(cases: list[str]) -> Iterator[tuple[str, str, int | None, dict[str, str]]]:
    """Yield tool, way, forced placement and options of each case."""
    from quantmill.build.quantizer import placement

    for case in cases:
        tool, way, *more = case.split(":")
        if tool not in PARAMETERS or way not in WAYS:
            sys.exit(f"error: --case {case}: is not TOOL:WAY of {', '.join(PARAMETERS)} and {', '.join(WAYS)}")
        options = dict(each.split("=", 1) for each in more[0].split(",")) if more else {}
        unknown = {each for each in options if not each.isupper()} - {"resume", "device"}
        if unknown:
            sys.exit(f"error: --case {case}: {', '.join(sorted(unknown))}: unknown; resume, device, or a variable")
        ladder = getattr(placement, LADDERS[tool])
        forced = [number for number, each in enumerate(ladder) if each.shared != "layer"] if way == "each" else [None]
        if way == "two" and (shared := [number for number, each in enumerate(ladder) if each.shared == "layer"]):
            forced = shared  # such a tool takes a second GPU only where one is too small
        for number in forced:
            yield tool, way, number, options


def run_case(
    tool: str, way: str, forced: int | None, words: dict[str, str], model: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Build once; return the record."""
    folder, out = options.folder, options.folder / f"out-{tool}"
    for left in [out, *folder.glob(f".{out.name}*")]:  # progress of a case that was stopped, too
        shutil.rmtree(left, ignore_errors=True)
    pythons = dict(each.split("=", 1) for each in options.python)
    python = pythons.get(ENVIRONMENTS[tool], str(ROOT / f"envs/{ENVIRONMENTS[tool]}/bin/python"))
    command = [python, "-P", str(WORKER), str(folder / "steps.json"), f"build.{tool}", str(model), str(out)]
    command += [f"--parameters={json.dumps(PARAMETERS[tool])}"]
    command += [f"--{name}={folder / name}.json" for name in ("calibration", "evaluation")]
    command += [f"--samples={options.samples}", f"--sequence-length={options.length}", f"--threads={options.threads}"]
    command += [f"--device={words.get('device', 'cuda')}", "--format=benchmark"]
    command += [f"--gpu-memory-gb={options.gb}"] if way == "limited" else []
    command += ["--gpus=2"] if way == "two" else []
    steps, log = folder / "steps.json", folder / f"{len(list(folder.glob('*.log'))):02}-{tool}-{way}.log"
    steps.unlink(missing_ok=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment |= {name: value for name, value in words.items() if name.isupper()}
    environment |= {"FORCED_PLACEMENT": str(forced)} if forced is not None else {}
    environment |= {"NO_RESUME": "1"} if words.get("resume") == "no" else {}
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file, memory_in_use(folder / "memory") as used:
        try:
            ended = subprocess.run(command, stdout=file, stderr=file, env=environment, timeout=options.limit)
            failed = ended.returncode != 0
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {options.limit:.0f} s\n")
            failed = True
    record: dict[str, Any] = {"tool": tool, "way": way, "forced": forced, "options": words}
    record |= {"samples": options.samples, "length": options.length, "layers": options.layers}
    record["seconds"] = round(time.monotonic() - started, 1)
    record["card_peak_bytes"] = max(used, default=None)
    record |= json.loads(steps.read_text(encoding="utf-8")) if steps.exists() else {}
    if failed:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        return record | {"failed": last[-1]}
    manifest = json.loads((out / "quantmill.json").read_text(encoding="utf-8"))
    weights = {name: each["sha256"] for name, each in manifest["files"].items() if name.endswith(".safetensors")}
    record["weights_sha256"] = hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()
    kept = ("placement", "build_s", "peak_memory_bytes", "tool_version", "weight_bytes")
    return record | {name: manifest.get(name) for name in kept}


@contextlib.contextmanager
def memory_in_use(file: Path) -> Iterator[list[int]]:
    """Collect the bytes in use on each GPU, by all processes, until the block ends."""
    found: list[int] = []
    if shutil.which("nvidia-smi") is None:
        yield found
        return
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=200"]
    with file.open("w", encoding="utf-8") as target, subprocess.Popen(command, stdout=target) as watcher:
        try:
            yield found
        finally:
            watcher.terminate()
            watcher.wait()
            found += [int(line) * 2**20 for line in file.read_text(encoding="utf-8").splitlines() if line.isdigit()]


def name_of(record: dict[str, Any]) -> str:
    """Return the case of a record in words."""
    words = [f"{record['tool']}:{record['way']}", record["forced"], *map("=".join, record["options"].items())]
    return " ".join(str(each) for each in words if each is not None)


def in_gb(nbytes: int | None) -> str:
    """Return bytes in GB."""
    return "" if nbytes is None else f"{nbytes / 1e9:.1f}"


def row(record: dict[str, Any]) -> dict[str, str]:
    """Return the row of a table for one case that did not fail."""
    place = record["placement"]
    return {
        "case": name_of(record),
        "layers": str(record["layers"] or "all"),
        "samples": f"{record['samples']} x {record['length']:,}",
        "weights, activations": f"{place['weights']}, {place['activations']}",
        "s": f"{record['build_s']:.0f}",
        "allowed, GB": in_gb(place["allowed_bytes"]),
        "predicted": in_gb(place["predicted_bytes"]),
        "torch's peak": in_gb(place["peak_bytes"]),
        "the GPU's peak": in_gb(record["card_peak_bytes"]),
        "weights' SHA-256": record["weights_sha256"][:8],
    }


def steps(records: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the rows of a table of GPTQ's steps and regions in seconds, with a column for each way; of one that ran
    twice, the last."""
    columns = {name_of(each): each for each in records if each["tool"] == "gptq" and not each["layers"]}
    seconds = {
        name: each["steps"] | {f"region {region}": times["seconds"] for region, times in each["regions"].items()}
        for name, each in columns.items()
    }
    labels = [label for label in next(iter(seconds.values())) if max(each[label] for each in seconds.values()) >= 1]
    return [{"step": label} | {name: f"{each[label]:.0f}" for name, each in seconds.items()} for label in labels]


def main() -> None:
    if sys.argv[1:2] == ["--table"]:
        cases, by_step, *measured = map(Path, sys.argv[2:])
        records = [record for path in measured for record in json.loads(path.read_text(encoding="utf-8"))]
        cases.write_text(json.dumps([row(each) for each in records]) + "\n", encoding="utf-8")
        by_step.write_text(json.dumps(steps(records)) + "\n", encoding="utf-8")
        return
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--config", type=Path, default=ROOT / "config/examples/llama-2-7b.json")
    arguments.add_argument("--layers", type=int, help="of the config's; default: all")
    arguments.add_argument("--samples", type=int, default=128)
    arguments.add_argument("--length", type=int, default=2048)
    arguments.add_argument("--gb", type=float, default=6, help="memory of the GPU in a limited case")
    arguments.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments.add_argument("--limit", type=float, help="seconds of a case, after which it is stopped")
    arguments.add_argument("--case", action="append", help=f"default: {' '.join(CASES)}")
    arguments.add_argument("--python", action="append", default=[], help="ENVIRONMENT=PYTHON")
    options = arguments.parse_args()
    planned = list(expand(options.case or CASES))
    model = make_model(options.folder, options.config, options.layers)
    records = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else []
    for tool, way, forced, words in planned:
        record = run_case(tool, way, forced, words, model, options)
        records.append(record)
        options.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        about = record.get("failed") or json.dumps({key: record.get(key) for key in ("placement", "steps")})
        print(f"{name_of(record)}: {record['seconds']} s: {about}", flush=True)


main()
