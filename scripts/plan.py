#!/usr/bin/env python3
"""Say what a study will take before any of it is done: jobs, downloads, disk, memory, time.

    python scripts/plan.py [CONFIG] [--disk GB]

Which jobs are left is asked of Snakemake; the rest follows from each model's config.json, which of a model of the hub
is all that is fetched. Disk counts weights and reference logits; files that will be hard links take none. Times are
from recorded results of the same format and kind of device. The status is 1 where the disk cannot hold it.
"""

import csv
import io
import shutil
import subprocess
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import constants

import devices
from common.program import UserError, parser, printable, run
from planning import disk, memory
from planning.config import TEXTS, source, with_defaults
from planning.origins import Origin, origin
from planning.rates import Rates, recorded

ARTIFACTS = Path("artifacts")
RECORDED = ("artifacts/report/results.json", "results/demo/results.json", "results/h200/results.json")
HUB_TEXTS = {"Salesforce/wikitext": 1_290_590}  # bytes of WikiText-2's test text, the default


@dataclass(frozen=True)
class Row:
    """A line of the table: bytes of disk, MB of memory, seconds of each job; None where unknown. `pending`: to do."""

    model: str
    name: str
    pending: bool
    disk: int | None
    mb: int | None = None
    seconds: tuple[float | None, ...] = (None,)


def pending(snakemake: Path, config: Path | None) -> tuple[Counter[str], set[str]]:
    """The jobs that are left, by rule, and the outputs that they will make.

    Raises `UserError` with Snakemake's own line where it cannot tell, as for a mistake in the config.
    """
    command = [str(snakemake), "--summary", *(["--configfile", str(config)] if config else []), "--", "report"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["it says nothing"]
        raise UserError(next((line for line in lines if "error: " in line), lines[-1]).removeprefix("error: "))
    start = result.stdout.index("output_file\t")
    rows = list(csv.DictReader(io.StringIO(result.stdout[start:]), delimiter="\t"))
    left = [row for row in rows if row["plan"] != "no update"]
    jobs = {  # a job may have several outputs
        (row["rule"], "" if row["rule"] == "page" else row["output_file"].removesuffix(".npz").removesuffix(".json"))
        for row in left
    }
    return Counter(rule for rule, _ in jobs), {row["output_file"] for row in left}


def study(config: Path) -> dict[str, Any]:
    """A config that Snakemake has accepted, with its defaults."""
    schema = yaml.safe_load(Path("config/config.schema.yaml").read_text(encoding="utf-8"))
    given = yaml.safe_load(config.read_text(encoding="utf-8"))
    return with_defaults({key: value for key, value in given.items() if value is not None}, schema, schema)


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def same_disk(one: Path, other: Path) -> bool:
    return existing(one).stat().st_dev == existing(other).stat().st_dev


def text_bytes(model: dict[str, Any], settings: dict[str, Any], kind: str) -> int | None:
    """Bytes of a model's text (TEXTS' kinds); None where it is of the hub and not known."""
    shipped, on_the_hub = TEXTS[kind]
    default = on_the_hub if source(model)[0] == "hub" else shipped
    text = settings["texts"].get(kind, default)
    return HUB_TEXTS.get(text["hub"]) if isinstance(text, dict) else Path(text).stat().st_size


def prompts(settings: dict[str, Any]) -> int:
    lines = Path(settings["texts"].get("prompts", TEXTS["prompts"][0])).read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) for line in lines)


def weights_rows(name: str, model: dict[str, Any], found: Origin, left: set[str]) -> list[Row]:
    """The source and the canonical safetensors: links where they can be."""
    kind, path = source(model)
    place = Path(constants.HF_HUB_CACHE) if kind == "hub" else path
    linked = kind != "random" and same_disk(place, ARTIFACTS)
    rows = [("source", 0 if linked else found.weight_bytes), ("safetensors", found.weight_bytes)]
    if found.form == "safetensors":
        rows[1] = ("safetensors", 0)
    mb = {"random": memory.RANDOM_WEIGHTS, "hub": memory.DOWNLOADING}.get(kind, memory.STREAMING)
    sizes = zip(rows, (mb, memory.STREAMING), strict=True)
    return [Row(name, what, f"artifacts/{name}/{what}" in left, size, mb) for (what, size), mb in sizes]


def format_row(
    name: str, model: dict[str, Any], format: str, found: Origin, left: set[str], settings: dict[str, Any], rates: Rates
) -> Row:
    """One format: its artifact, and the jobs that build, score and time it."""
    outputs = {
        what: f"artifacts/{name}/{what}" for what in (format, f"latency/{format}.json", f"quality/{format}.json")
    }
    build, latency, quality = (path in left for path in outputs.values())
    if found.shape is None:
        return Row(name, format, build or latency or quality, None)
    size = disk.artifact_bytes(format, found.shape, group(settings, format))
    if format == "fp16" and found.dtype == "float16":
        size = 0
    calibration_bytes = text_bytes(model, settings, "calibration")
    tokens = None if calibration_bytes is None else int(calibration_bytes * disk.POSITIONS_A_BYTE)
    calibration = memory.filled(settings["calibration"], found.shape, tokens)
    gated = source(model)[0] != "random"
    asked = calibration, settings["device"], gated, settings["perplexity"]
    mb = [memory.build_mb(format, found.shape, *asked)] if build else []
    mb += [memory.latency_mb(format, found.shape, settings["device"])] if latency else []
    scored = [format, *([settings["reference"]] if settings["reference_logits"] == "recompute" else [])]
    longest = memory.window(settings["perplexity"])
    mb += [sum(memory.engine_mb(each, found.shape, settings["device"], longest) for each in scored)] if quality else []
    text = text_bytes(model, settings, "evaluation")
    seconds = [rates.build(calibration["samples"] * calibration["sequence_length"])] if build else []
    seconds += [rates.latency(settings["latency"], prompts(settings))] if latency else []
    if quality:
        positions = text and int(text * disk.POSITIONS_A_BYTE)
        seconds += [rates.scoring(positions, found.shape.vocab) if positions else None]
    return Row(
        *(name, format, build or latency or quality, size if build else 0),
        max(mb, default=None),
        tuple(seconds),
    )


def group(settings: dict[str, Any], format: str) -> int | str:
    return settings["awq"]["q_group_size"] if format == "awq-int4" else settings["gptq"]["group_size"]


def planned(settings: dict[str, Any], left: set[str]) -> tuple[list[Row], dict[str, Origin]]:
    """The rows of all models, and what is known of each."""
    results = recorded(map(Path, RECORDED))
    origins = {name: origin(model, ARTIFACTS / name) for name, model in settings["models"].items()}
    rows: list[Row] = []
    for name, model in settings["models"].items():
        found = origins[name]
        rows += weights_rows(name, model, found, left)
        for format in model.get("formats", settings["formats"]):
            rates = Rates(results, settings["device"], format, found.shape.parameters if found.shape else 0)
            rows.append(format_row(name, model, format, found, left, settings, rates))
        logits = f"artifacts/{name}/quality/{settings['reference']}-logits.npy"
        if logits in left:
            text = text_bytes(model, settings, "evaluation")
            known = found.shape is not None and found.shape.vocab and text
            rows.append(Row(name, "logits", True, disk.logits_bytes(text, found.shape.vocab) if known else None))
    return rows, origins


def peak(rows: Iterable[Row], origins: dict[str, Origin]) -> int:
    """Bytes that artifacts/ grows by at most, downloads included where they land on its disk.

    What is replaced is there beside what replaces it until that is whole; the largest of them counts, as well as a
    quantizer's saved progress, which is about as large as its artifact.
    """
    rows = [row for row in rows if row.pending and row.disk]
    new = [row for row in rows if not (ARTIFACTS / row.model / row.name).exists()]
    beside = [row.disk for row in rows if row not in new or row.name == "gptq-int4"]
    grown = sum(row.disk for row in new) + max(beside, default=0)
    if same_disk(Path(constants.HF_HUB_CACHE), ARTIFACTS):
        grown += sum(found.download for found in origins.values())
    return grown


def amount(nbytes: int | None) -> str:
    """Bytes for people."""
    if nbytes is None:
        return "unknown"
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def minutes(seconds: Iterable[float | None]) -> str:
    """Minutes of several jobs; a `+` stands for those whose time is unknown."""
    jobs = list(seconds)
    known = [each for each in jobs if each is not None]
    return f"{sum(known) / 60:.1f} min{' +' * (len(known) < len(jobs))}" if known or not jobs else "unknown"


def table(lines: list[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell; numbers stand right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [
        [c.ljust(w) if n < 2 else c.rjust(w) for n, (c, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def show(rows: list[Row], origins: dict[str, Origin], jobs: Counter[str]) -> None:
    """Print models, what is to be made of them, and jobs."""
    lines = [("model", "", "parameters", "weights", "to download")]
    for name, found in origins.items():
        count = f"{'' if found.shape.exact else 'about '}{found.shape.parameters:,}" if found.shape else "unknown"
        lines.append((name, "", count, amount(found.weight_bytes), amount(found.download if not found.why else None)))
    print(table(lines))
    for name, found in origins.items():
        if found.why:
            print(f"{name}: {printable(found.why)}")
    work = [row for row in rows if row.pending]
    lines = [("model", "to make", "disk", "memory", "time")]
    lines += [
        (row.model, row.name, amount(row.disk), "" if row.mb is None else f"{row.mb:,} MB", minutes(row.seconds))
        for row in work
    ]
    print("", table(lines) if work else "Nothing is left to make of the models.", "", sep="\n")
    print(f"jobs: {jobs.total()} ({', '.join(f'{count} {rule}' for rule, count in sorted(jobs.items()))})")


def parse() -> Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("config", type=Path, nargs="?", help="a study; the demo's config without one")
    arguments.add_argument("--disk", type=float, metavar="GB", help="disk to plan for; what is free, without it")
    arguments.add_argument("--snakemake", type=Path, default=Path(".venv/bin/snakemake"))
    return arguments.parse_args()


def main() -> None:
    options = parse()
    jobs, left = pending(options.snakemake, options.config)
    settings = study(options.config or Path("config/config.yaml"))
    if settings["device"] == "auto":
        settings["device"] = devices.resolve("auto", hold=False)
    rows, origins = planned(settings, left)
    show(rows, origins, jobs)
    work = [row for row in rows if row.pending]
    seconds = [each for row in work for each in row.seconds]
    known = all(not found.why for found in origins.values())
    most = max((row.mb for row in work if row.mb), default=0)
    need = peak(rows, origins)
    free = int(options.disk * 1e9) if options.disk is not None else shutil.disk_usage(existing(ARTIFACTS)).free
    unknown = any(row.disk is None for row in work)
    download = sum(found.download for found in origins.values())
    print(f"download: {'' if known else 'at least '}{amount(download)}")
    print(f"disk at peak: {'at least ' if unknown else ''}{amount(need)}, of {amount(free)} free")
    print(f"memory of the largest job: {most:,} MB")
    print(
        f"time, one job after another, device {settings['device']}: {minutes(seconds)}"
        f"{f' {seconds.count(None)} jobs of unknown time' if None in seconds else ''}"
    )
    if need > free:
        other = "" if settings["reference_logits"] == "recompute" else ", or set reference_logits: recompute"
        raise UserError(
            f"{existing(ARTIFACTS)}: the study takes {amount(need)} and {amount(free)} are free; free some disk, leave "
            f"formats out{other}"
        )


if __name__ == "__main__":
    run(main)
