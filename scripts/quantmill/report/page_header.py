"""The page's header: under which conditions its figures hold, in a line that is read before any of them."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def distinct(values: Iterable[Any]) -> list[str]:
    """Values as text, each once and in their order, without None."""
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def versions(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Library -> its versions. What engines record beside them (a kernel, a target) is no version."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, text in (row["versions"] or {}).items():
            if str(text)[:1].isdigit() and str(text) not in found.setdefault(name, []):
                found[name].append(str(text))
    return {name: texts for name, texts in found.items() if texts}


def load(protocol: Mapping[str, Any]) -> str:
    """What a latency protocol puts an engine under."""
    counts = [(protocol[name], one, name) for one, name in (("process", "processes"), ("repeat", "repeats"))]
    times = [f"{count} {one if count == 1 else several}" for count, one, several in counts]
    parts = [f"batch {protocol.get('batch', 1)}", f"{protocol['new_tokens']} new tokens after each prompt", *times]
    return ", ".join(parts)


def scoring(protocol: Mapping[str, Any]) -> str:
    """How a perplexity was measured."""
    parts = [protocol["perplexity"]]
    if "windows" in protocol:
        parts.append(f"{protocol['windows']} windows of up to {protocol['window']} tokens")
    return ", ".join(parts)


def text(row: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The text that a row was scored on: its file, its hash, and how many tokens of it count."""
    texts = config["models"][row["model"]].get("texts") or {}
    found = texts.get("evaluation", "evaluation text")
    name = Path(found).name if isinstance(found, str) else f"{found['hub']}/{found['file']}"
    scored = f"{row['quality_totals']['scored_tokens']:,} tokens scored"
    return f"{name} (SHA-256 {row['protocol']['quality']['text_sha256'][:8]}), {scored}"


def dates(files: Iterable[str], now: datetime) -> tuple[str, str]:
    """The days that the result files are dated, or that of the page where there is no file."""
    paths = [Path(file) for file in files]
    days = sorted({f"{datetime.fromtimestamp(path.stat().st_mtime, UTC):%Y-%m-%d}" for path in paths if path.exists()})
    if not days:
        return "page made", f"{now:%Y-%m-%d}"
    return "results dated", days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def header(
    results: Mapping[str, Any], study: Mapping[str, Any], commit: str | None, now: datetime
) -> list[tuple[str, str]]:
    """Name and value of each fact, those left out that no row has. `now`: with a time zone."""
    rows = results["rows"]
    timed = [row for row in rows if row["protocol"]["latency"]]
    scored = [row for row in rows if row["protocol"]["quality"]]
    threads = sorted({row["threads"] for row in timed if row["threads"]})
    listed = {
        "device": distinct(row["device"] for row in timed),
        "threads": [" or ".join(map(str, threads)) + (", what was fastest for each row" if threads[1:] else "")]
        if threads
        else [],
        "load": distinct(load(row["protocol"]["latency"]) for row in timed),
        "text": distinct(text(row, results["config"]) for row in scored),
        "protocol": distinct(scoring(row["protocol"]["quality"]) for row in scored),
        "versions": [f"{name} {' and '.join(texts)}" for name, texts in sorted(versions(rows).items())],
        "Quantmill": [f"{(commit or 'outside a checkout')[:12]}, metrics version {results['metrics_version']}"],
    }
    found = [(name, (", " if name == "versions" else "; ").join(values)) for name, values in listed.items() if values]
    return [*found, dates(filter(None, (cell["latency"] for cell in study["cells"])), now)]
