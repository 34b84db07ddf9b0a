"""Predictions of `make plan` and the rules, and what recorded jobs took.

    PYTHONPATH=tests:tests/helpers:scripts .venv/bin/python tests/plan/predictions.py

prints a table of both. Truths are manifests (peak memory and seconds of builds), latency files (resident memory on a
GPU; seconds of loading and of tokens) and rows (resident memory on a CPU).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conftest import REPO
from recorded_rows import MACHINES, ROWS, STAND_INS, device_of, jobs_of, machine_of, of_parameters, of_row

from quantmill.plan.jobs import BANDWIDTH, job_mb
from quantmill.plan.resources import CUDA_BUILD

WITHOUT_TORCH = {"fp16", "mlc-q4f16_1"}  # are built
WITH_TORCH = {"transformers", "gptqmodel", "bitsandbytes", "torchao", "hqq"}
# rows that today's programs built: CTranslate2's own converter, which held the model, built the others
BUILT = [row for row in ROWS if row["artifact"]["tool"] != "ctranslate2" or "written" in row["artifact"]]


@dataclass(frozen=True)
class Pair:
    """A prediction for a recorded job, and the truth."""

    what: str
    name: str
    predicted: float
    took: float


def _built(row: dict[str, Any]) -> tuple[str, Any]:
    made = {name: row["artifact"]["parameters"].get(name, 1) for name in ("samples", "sequence_length")}
    jobs = jobs_of(device_of(row), MACHINES[machine_of(row)], calibration=made)
    name = f"{row['study']['of']} {row['model']} {row['format']}"
    return name, jobs.build(row["format"], row["engine"], of_row(row), gated=False)


def builds_memory() -> Iterator[Pair]:
    """MB of builds; of GGUF the program is recorded that starts llama.cpp's."""
    for row in BUILT:
        if not row["format"].startswith("gguf-"):
            took = row["artifact"]["peak_memory_bytes"] / 1e6
            if device_of(row) == "cpu" and row["format"] not in WITHOUT_TORCH:
                took += CUDA_BUILD  # recorded with a CPU build
            name, predicted = _built(row)
            yield Pair("MB to build", name, predicted.mb, job_mb(took))


def builds_seconds() -> Iterator[Pair]:
    """Seconds of builds. The quickest counts where several hosts of a kind built the same: on one, libraries were read
    for the first time in minutes."""
    least: dict[tuple[Any, ...], float] = {}
    for row in BUILT:
        key = row["model"], row["format"], device_of(row)
        least[key] = min(row["artifact"]["build_s"], least.get(key, row["artifact"]["build_s"]))
    for row in BUILT:
        if row["artifact"]["build_s"] == least[row["model"], row["format"], device_of(row)]:
            name, predicted = _built(row)
            yield Pair("s to build", name, predicted.seconds, row["artifact"]["build_s"])


def runs_on_a_cpu() -> Iterator[Pair]:
    """MB of latency jobs on a CPU, with the buffers of the copy that they measure."""
    for row in ROWS:
        if row["peak_memory_bytes"] and device_of(row) == "cpu":
            took = row["peak_memory_bytes"] / 1e6 + (CUDA_BUILD if row["engine"] in WITH_TORCH else 0)
            asked = jobs_of("cpu").latency(row["format"], row["engine"], of_row(row), prompts=9).mb
            name = f"{row['study']['of']} {row['model']} {row['format']}"
            yield Pair("MB to run", name, asked, job_mb(max(took, BANDWIDTH)))


def runs_on_a_gpu() -> Iterator[Pair]:
    """MB and seconds of latency jobs on a GPU. Memory is that of the plain way: what capturing compiles is compiled by
    a process a core, whose shared pages are counted once for each."""
    for path in sorted(REPO.glob("results/**/latency/*.json")):
        result = json.loads(path.read_text())
        ways = [result, *result["other_modes"]]
        protocol = result["protocol"] | {"decode": "captured" if len(ways) > 1 else "generate"}
        format = path.stem.partition("@")[0]
        engine = result["engine"].replace("mlc", "quantmill-tvm")
        model = of_parameters(result["artifact"]["parameter_count"])
        jobs = jobs_of("cuda", MACHINES[result["device"]["name"]], latency=protocol)
        predicted = jobs.latency(STAND_INS.get(format, format), engine, model, len(result["prompts"]))
        plain = next((way for way in ways if way["mode"] in ("generate", "eager")), result)
        name = " ".join([*path.parts[len(REPO.parts) + 1 : -2], path.stem])
        yield Pair("MB to run", name, predicted.mb, job_mb(plain["memory_bytes"]["resident"] / 1e6))
        if all(way.get("runs") for way in ways):
            took = sum(sum(way["load_seconds"]) for way in ways)
            took += sum(run["token_seconds"][-1] for way in ways for run in way["runs"])
            yield Pair("s to run", name, predicted.seconds, took)


def main() -> None:
    for source in (builds_memory, runs_on_a_cpu, builds_seconds, runs_on_a_gpu):
        for pair in source():
            ratio = pair.predicted / pair.took
            print(f"{pair.what:12}{pair.name:48}{pair.predicted:10.1f}{pair.took:10.1f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
