"""index.html: one file that needs no network. Its data is JSON, which its scripts show as text and never as markup."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from quantmill.metrics.serving import LEVELS
from quantmill.report import axes, caveats, page_details, page_header, tasks
from quantmill.report.column import Column
from quantmill.report.drawing import Drawing
from quantmill.report.labels import label, mode_label
from quantmill.report.load_columns import LOAD_COLUMNS
from quantmill.report.results import failures

FILES = Path(__file__).with_name("page_files")
SCRIPTS = ("elements.js", "help.js", "notices.js", "verdict.js", "plots.js", "table.js", "details.js")
SCRIPTS += ("loads.js", "main.js")
ORIGINS = (
    *("run by", "source", "built by", "SHA-256 of sha256sum's lines for its files", "calibration text, SHA-256"),
    *("quality gate", "libraries", "device", "latency", "quality"),
)
PLOTTED = ("perplexity_low", "perplexity_high", *axes.LOSS, "roofline", "label")  # what no column has
MODE = ("refused", "differs", "tokens_per_second")  # of another way to decode
PAGE_BYTES = 2_900_000  # of the page: details of models are left out beyond it
RELOAD = 5  # seconds, of a page that is still being filled
DIGITS = 6  # of figures in the page; results.json has them all


def columns(table: Sequence[Column]) -> list[dict[str, Any]]:
    """What the page's scripts take of every column; `shown` is its place among those shown at once, or null."""
    return [
        {"title": column.title or column.name.replace("_", " "), "name": column.name, "unit": column.unit}
        | {"text": column.text, "better": column.better, "shown": column.shown}
        | ({"share": True} if column.limits.get("maximum") == 1 else {})
        for column in table
    ]


def round_figure(value: Any) -> Any:
    """A figure with the digits that the page keeps."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


class Pool:
    """Values that many rows share, each kept once; a row holds its number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, value: Any) -> int:
        key = json.dumps(value, sort_keys=True)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]


def provenance(row: Mapping[str, Any]) -> list[Any]:
    """What made a row's figures, in the order of `ORIGINS`."""
    artifact = row["artifact"] or {}
    return [
        {name: row[name] or "none" for name in ("engine", "options", "gpus")},
        artifact.get("source"),
        {name: artifact.get(name) for name in ("tool", "tool_version", "parameters")},
        *(artifact.get(name) for name in ("files_sha256", "calibration_sha256", "gate")),
        row["versions"],
        row["device_details"],
        row["protocol"]["latency"],
        row["protocol"]["quality"],
    ]


def short(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What the page says of a longer prompt or a batch."""
    names = ("tokens", "batch", "skipped", "refused", "ttft_ms_p50", "tpot_ms_p50", "tokens_per_second")
    return {name: round_figure(entry[name]) for name in names if name in entry}


def differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """In words, where rows of one model were not measured alike: devices, drivers, versions of the same library."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        seen: dict[str, dict[str, list[str]]] = {}
        for row in rows:
            if row["model"] != model or row["versions"] is None or row["device_details"] is None:
                continue
            device = {name: row["device_details"].get(name) for name in ("name", "driver")}
            versions = {name: text for name, text in row["versions"].items() if str(text)[:1].isdigit()}
            for name, value in ({"device": device["name"], "driver": device["driver"]} | versions).items():
                if value:
                    seen.setdefault(name, {}).setdefault(str(value), []).append(label(row))
        for name, values in seen.items():
            if len(values) > 1:
                each = "; ".join(f"{value} ({', '.join(formats)})" for value, formats in values.items())
                found.append(f"{model}: {name} differs between rows: {each}")
    return found


def commit() -> str | None:
    """Quantmill's own commit, marked where files were changed since; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=FILES, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() or None


def row_data(row: Mapping[str, Any], drawn: Mapping[str, Any], pool: Pool, table: Sequence[Column]) -> dict[str, Any]:
    """One row as the page's scripts take it."""
    reasons: dict[int, list[str]] = {}
    for name, reason in row["missing"].items():
        reasons.setdefault(pool.number(reason), []).append(name)
    return {
        "label": label(row),
        "run": row["run"],
        "prebuilt": row["prebuilt"],
        "values": [round_figure(row[column.name]) for column in table],
        "missing": reasons,
        "ratio": row["perplexity_ratio"]
        and {name: round_figure(value) for name, value in row["perplexity_ratio"].items()},
        "plot": [round_figure(drawn[name]) for name in PLOTTED],
        "runs in": [row["compute_type"], mode_label(row["mode"]), row["threads"]],
        "modes": [
            {name: round_figure(way[name]) for name in MODE} | {"mode": mode_label(way["mode"])}
            for way in row["other_modes"] or []
        ],
        "differs": row["differs"],
        "dominated by": row["dominated_by"] or [],
        "unchecked": caveats.unchecked(row),
        "warnings": row["warnings"],
        "verdict warnings": caveats.for_verdict(row),
        "bandwidth disturbed": bool(row["device_bandwidth"] and row["device_bandwidth"]["disturbed"]),
        "variants": [short(entry) for entry in (row["lengths"] or []) + (row["batches"] or [])],
        "origins": [pool.number(value) for value in provenance(row)],
    }


def name(row: Mapping[str, Any]) -> str:
    """A row as the page calls it."""
    return f"{row['model']}/{label(row)}"


def failure_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many rows lack what the study asked for, and a line for each; nothing where none does."""
    failed: dict[str, list[str]] = {}
    for row in rows:
        failed.setdefault(name(row), []).extend(failures(row))
    whole = len(failed)
    failed = {each: list(dict.fromkeys(reasons)) for each, reasons in failed.items() if reasons}
    if not failed:
        return []
    what = "formats" if len({row["model"] for row in rows}) == 1 else "rows (a model in a format)"
    lines = [f"{each}: {'; '.join(reasons)}" for each, reasons in failed.items()]
    return [f"Not complete: {len(failed)} of {whole} {what} failed.", *lines]


def pending_lines(study: Mapping[str, Any]) -> list[str]:
    """What is still to come while jobs run, a line for each row; nothing once all is done."""
    parts = {name(cell): [each.replace("_", " ") for each in cell.get("pending", ())] for cell in study["cells"]}
    return [f"{row}: {', '.join(each)}" for row, each in parts.items() if each]


def commands(study: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What a reader may want to run: `build` a row's artifact again, whose path follows; `resume` the study; `redraw`
    the page alone; measure just the speed of the rows that were `disturbed` again."""
    options = study["options"]
    cells = study["cells"]  # none on the page of several studies, which no command goes on with
    disturbed = [cell["latency"] for cell, row in zip(cells, rows, strict=bool(cells)) if row["interference"]]
    return {
        "build": f"snakemake {options} --force",
        "resume": f"snakemake report {options}" if cells else "",
        "redraw": f"snakemake report {options} --forcerun page",
        "disturbed": " ".join([f"snakemake report {options} --forcerun", *disturbed]) if disturbed else "",
    }


def of_models(study: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Details of as many models as there is room for, in bytes, in the study's order; None for the others. A page of
    several runs or studies has none: it knows no files."""
    config = study["config"]
    found: dict[str, Any] = {}
    for model in config["models"] if study["cells"] else ():
        cells = [cell for cell in study["cells"] if cell["model"] == model]
        each = page_details.of_model(cells, config) if cells and room > 0 else None
        room -= len(json.dumps(each))
        found[model] = each if room > 0 else None
    return found


def load_data(rows: Sequence[Mapping[str, Any]], pool: Pool) -> dict[str, Any]:
    """The rows of servers under load as the page's scripts take them."""

    def reasons(row: Mapping[str, Any]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, why in row["missing"].items():
            found.setdefault(pool.number(why), []).append(name)
        return found

    return {
        "columns": columns(LOAD_COLUMNS),
        "rows": [[round_figure(row[column.name]) for column in LOAD_COLUMNS] for row in rows],
        "missing": [reasons(row) for row in rows],
        "quantiles": [
            {name: [round_figure(value) for value in values] for name, values in row["quantiles"].items()}
            for row in rows
        ],
        "trials": [row.get("trials") for row in rows],
        "defaults": [label({"format": row["format"], "run": row.get("default_run")}) for row in rows],
        "levels": LEVELS,
    }


def data(results: Mapping[str, Any], study: Mapping[str, Any], drawing: Drawing) -> dict[str, Any]:
    """Everything that the page's scripts show, but for the details of models."""
    pool, (table, rows) = Pool(), tasks.widen(results)
    drawn = axes.points(rows, tasks.axes(table))
    return {
        "reference": results["config"]["reference"],
        "columns": columns(table),
        "plotted": PLOTTED,
        "rows": [row_data(row, each, pool, table) for row, each in zip(rows, drawn, strict=True)],
        "origins": ORIGINS,
        "commands": commands(study, rows),
        "unfinished": failure_lines([*rows, *results.get("loads", ())]),
        "running": pending_lines(study),
        "undrawn": drawing.refused,
        "plots": drawing.plots,
        "loads": load_data(results["loads"], pool) if "loads" in results else None,
        "load plots": drawing.loads,
        "axes": {"quality": axes.qualities(drawn), "cost": axes.COSTS}
        | {"more is better": [*axes.MORE_IS_BETTER, *tasks.axes(table)], "sizes": axes.SIZES},
        "detail plots": drawing.details,
        "quantiles": page_details.QUANTILES,
        "edges": [round_figure(float(edge)) for edge in page_details.EDGES],
        "pool": pool.values,
        "differences": differences(rows),
        "config": results["config"],
        "commit": commit(),
        "versions": {name: results[name] for name in ("schema_version", "metrics_version")},
    }


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def render(results: Mapping[str, Any], study: Mapping[str, Any], drawing: Drawing) -> str:
    """The page's text. While jobs still run, it loads itself anew every few seconds."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FILES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    content = data(results, study, drawing)
    room = PAGE_BYTES - len(drawing.vega) - len(_text(content))
    content["details"] = of_models(study, room)
    return environment.get_template("page.html.j2").render(
        models=list(results["config"]["models"]),
        facts=page_header.header(results, study, content["commit"], datetime.now(UTC)),
        reload=RELOAD if content["running"] else None,
        style=Markup((FILES / "style.css").read_text(encoding="utf-8")),
        data=Markup(_text(content).replace("<", "\\u003c")),
        vega=Markup(drawing.vega.replace("</script", "<\\/script")),
        scripts=Markup("\n".join((FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)),
    )
