"""The page's header: the conditions of its figures, in a line above them."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantmill.report.rows import Results, Row, Study


def distinct(values: Iterable[Any]) -> list[str]:
    """Return values as text, each once and in their order, without None."""
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def versions(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Map libraries to their versions. Other things that engines record (a kernel, a target) are left out."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, text in (row["versions"] or {}).items():
            if str(text)[:1].isdigit() and str(text) not in found.setdefault(name, []):
                found[name].append(str(text))
    return found


def load(protocol: Mapping[str, Any]) -> str:
    """Describe the load of a latency protocol."""
    counts = [(protocol[name], one, name) for one, name in (("process", "processes"), ("repeat", "repeats"))]
    times = [f"{count} {one if count == 1 else several}" for count, one, several in counts]
    parts = [f"batch {protocol.get('batch', 1)}", f"{protocol['new_tokens']} new tokens after each prompt", *times]
    return ", ".join(parts)


def scoring(protocol: Mapping[str, Any]) -> str:
    """Describe how a perplexity was measured."""
    parts = [protocol["perplexity"]]
    if "windows" in protocol:
        parts.append(f"{protocol['windows']} windows of up to {protocol['window']} tokens")
    return ", ".join(parts)


def text(row: Row, quality: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Describe the text that a row was scored on: its file, its hash, and how many tokens of it count."""
    texts = config["models"][row["model"]].get("texts") or {}
    found = texts.get("evaluation", "evaluation text")
    name = Path(found).name if isinstance(found, str) else f"{found['hub']}/{found['file']}"
    scored = f"{(row['quality_totals'] or {})['scored_tokens']:,} tokens scored"
    return f"{name} (SHA-256 {quality['text_sha256'][:8]}), {scored}"


def dates(files: Iterable[str], now: datetime) -> tuple[str, str]:
    """Return the days of the result files, or that of the page without any."""
    paths = [Path(file) for file in files]
    days = sorted({f"{datetime.fromtimestamp(path.stat().st_mtime, UTC):%Y-%m-%d}" for path in paths if path.exists()})
    if not days:
        return "page made", f"{now:%Y-%m-%d}"
    return "results dated", days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def header(results: Results, study: Study, commit: str | None, now: datetime) -> list[tuple[str, str]]:
    """Return name and value of each fact that some row has. `now`: with a time zone."""
    rows = results["rows"]
    timed = [(row, found) for row in rows if (found := row["protocol"]["latency"])]
    scored = [(row, found) for row in rows if (found := row["protocol"]["quality"])]
    threads = sorted({row["threads"] for row, _ in timed if row["threads"]})
    listed: dict[str, list[str]] = {
        "device": distinct(row["device"] for row, _ in timed),
        "threads": [" or ".join(map(str, threads)) + (", what was fastest for each row" if threads[1:] else "")]
        if threads
        else [],
        "load": distinct(load(protocol) for _, protocol in timed),
        "text": distinct(text(row, protocol, results["config"]) for row, protocol in scored),
        "protocol": distinct(scoring(protocol) for _, protocol in scored),
        "versions": [f"{name} {' and '.join(texts)}" for name, texts in sorted(versions(rows).items())],
        "Quantmill": [f"{(commit or 'outside a checkout')[:12]}, metrics version {results['metrics_version']}"],
    }
    facts = [(name, (", " if name == "versions" else "; ").join(values)) for name, values in listed.items() if values]
    return [*facts, dates(filter(None, (cell["latency"] for cell in study["cells"])), now)]
