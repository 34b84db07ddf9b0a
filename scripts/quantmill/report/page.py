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
from quantmill.report import axes, caveats, deployed, page_details, page_header, tasks
from quantmill.report.column import Column
from quantmill.report.drawing import Drawing
from quantmill.report.labels import label, mode_label
from quantmill.report.load_columns import LOAD_COLUMNS
from quantmill.report.results import failures
from quantmill.report.rows import Load, Results, Row, Study, value_of

FILES = Path(__file__).with_name("page_files")
SCRIPTS = ["elements.js", "help.js", "notices.js", "verdict.js", "plots.js", "table.js", "details.js", "loads.js"]
SCRIPTS += ["main.js"]
ORIGINS = (
    *("run by", "source", "built by", "SHA-256 of sha256sum's lines for its files", "calibration text, SHA-256"),
    *("quality gate", "libraries", "device", "latency", "quality"),
)
PLOTTED = ("perplexity_low", "perplexity_high", *axes.LOSS, *axes.SPEED, "roofline", "label", "pale")  # not as columns
VARIANT = ("tokens", "batch", "skipped", "refused", "ttft_ms_p50", "tpot_ms_p50", "tokens_per_second")
PAGE_BYTES = 2_900_000  # of the page; beyond it, details of models are left out
RELOAD = 5  # seconds, of a page that is still being filled
DIGITS = 6  # of figures in the page; results.json has them all


def columns(table: Sequence[Column]) -> list[dict[str, Any]]:
    """Return what the page's scripts take of every column; `shown` is its place among those shown at once, or null."""
    return [
        {"title": column.title or column.name.replace("_", " "), "name": column.name, "unit": column.unit}
        | {"text": column.text, "better": column.better, "shown": column.shown}
        | ({"share": True} if column.limits.get("maximum") == 1 else {})
        for column in table
    ]


def round_figure(value: Any) -> Any:
    """Round a figure to the digits that the page keeps."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


class Pool:
    """Values that many rows share, each kept once; a row holds the number of its value."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, value: Any) -> int:
        key = json.dumps(value, sort_keys=True)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]


def provenance(row: Row) -> list[Any]:
    """Return what made a row's figures, in the order of `ORIGINS`."""
    artifact = row["artifact"] or {}
    return [
        {"engine": row["engine"], "options": row["options"] or "none", "gpus": row["gpus"]},
        artifact.get("source"),
        {name: artifact.get(name) for name in ("tool", "tool_version", "parameters")}
        | ({"written": artifact["written"]} if "written" in artifact else {}),
        *(artifact.get(name) for name in ("files_sha256", "calibration_sha256", "gate")),
        row["versions"],
        row["device_details"],
        row["protocol"]["latency"],
        row["protocol"]["quality"],
    ]


def experts(row: Row) -> dict[str, Any] | None:
    """Return how many experts of a mixture saw few calibration tokens, and how many none; None if that is unknown."""
    found = (row["artifact"] or {}).get("experts") or {}
    if "few" not in found:
        return None
    names = ("count", "few", "below")
    return {name: found[name] for name in names} | {
        "none": len(found["unreached"]),
        "all": bool(found.get("all_tokens")),
    }


def differences(rows: Sequence[Row]) -> list[str]:
    """Describe how rows of one model were measured differently: devices, drivers, versions of the same library."""
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
    """Return Quantmill's own commit, marked if files were changed since; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=FILES, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() or None


def reasons(row: Row | Load, pool: Pool) -> dict[int, list[str]]:
    """Return the columns that a row lacks, by the number of the reason."""
    found: dict[int, list[str]] = {}
    for column, why in row["missing"].items():
        found.setdefault(pool.number(why), []).append(column)
    return found


def row_data(row: Row, drawn: Mapping[str, Any], pool: Pool, table: Sequence[Column]) -> dict[str, Any]:
    """Return a row as the page's scripts take it."""
    ratio = row["perplexity_ratio"]
    return {
        "label": label(row),
        "run": row["run"],
        "prebuilt": row["prebuilt"],
        "values": [round_figure(value_of(row, column.name)) for column in table],
        "missing": reasons(row, pool),
        "ratio": ratio and {name: round_figure(value) for name, value in ratio.items()},
        "plot": [round_figure(drawn[name]) for name in PLOTTED],
        "runs in": [row["compute_type"], mode_label(row["mode"]), row["threads"]],
        "modes": [
            {"mode": mode_label(way["mode"]), "refused": way["refused"], "differs": way["differs"]}
            | {"tokens_per_second": round_figure(way["tokens_per_second"])}
            for way in row["other_modes"] or []
        ],
        "differs": row["differs"],
        "dominated by": row["dominated_by"] or [],
        "unchecked": caveats.unchecked(row),
        "experts": experts(row),
        "warnings": row["warnings"],
        "own": deployed.why_own(row),
        "bandwidth disturbed": bool(row["device_bandwidth"] and row["device_bandwidth"]["disturbed"]),
        "variants": [
            {name: round_figure(value_of(entry, name)) for name in VARIANT if name in entry}
            for entry in (row["lengths"] or []) + (row["batches"] or [])
        ],
        "origins": [pool.number(value) for value in provenance(row)],
    }


def name(row: Mapping[str, Any]) -> str:
    """Return the page's name of a row."""
    return f"{row['model']}/{label(row)}"


def failure_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how many rows lack what the study asked for, and a line for each; nothing if none does."""
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


def pending_lines(study: Study) -> list[str]:
    """Return what is still to come while jobs run, a line for each row."""
    parts = {name(cell): [each.replace("_", " ") for each in cell.get("pending", ())] for cell in study["cells"]}
    return [f"{row}: {', '.join(each)}" for row, each in parts.items() if each]


def commands(study: Study, rows: Sequence[Row]) -> dict[str, str]:
    """Return commands for the reader: `build` a row's artifact again, whose path follows; `resume` the study; `redraw`
    only the page; measure the speed of rows that were `disturbed` again."""
    options = study["options"]
    cells = study["cells"]  # none on the page of several studies, which no command resumes
    measured = [cell["latency"] for cell, row in zip(cells, rows, strict=bool(cells)) if row["interference"]]
    disturbed = list(filter(None, measured))
    return {
        "build": f"snakemake {options} --force",
        "resume": f"snakemake report {options}" if cells else "",
        "redraw": f"snakemake report {options} --forcerun page",
        "disturbed": " ".join([f"snakemake report {options} --forcerun", *disturbed]) if disturbed else "",
    }


def of_models(study: Study, room: int) -> dict[str, Any]:
    """Return the details of the models that fit into `room` bytes, in the study's order; None for the others. A page of
    several runs or studies has none, since it has no files."""
    config = study["config"]
    found: dict[str, Any] = {}
    for model in config["models"] if study["cells"] else ():
        cells = [cell for cell in study["cells"] if cell["model"] == model]
        each = page_details.of_model(cells, config) if cells and room > 0 else None
        room -= len(json.dumps(each))
        found[model] = each if room > 0 else None
    return found


def load_data(rows: Sequence[Load], pool: Pool) -> dict[str, Any]:
    """Return the rows of servers under load as the page's scripts take them."""
    return {
        "columns": columns(LOAD_COLUMNS),
        "rows": [[round_figure(value_of(row, column.name)) for column in LOAD_COLUMNS] for row in rows],
        "missing": [reasons(row, pool) for row in rows],
        "quantiles": [
            {name: [round_figure(value) for value in values] for name, values in row["quantiles"].items()}
            for row in rows
        ],
        "trials": [row.get("trials") for row in rows],
        "defaults": [label({"format": row["format"], "run": row.get("default_run")}) for row in rows],
        "levels": LEVELS,
    }


def data(results: Results, study: Study, drawing: Drawing) -> dict[str, Any]:
    """Return everything that the page's scripts show, except the details of models."""
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
        "axes": {"quality": axes.qualities(drawn), "cost": axes.costs(drawn)}
        | {"more is better": [*axes.MORE_IS_BETTER, *tasks.axes(table)], "sizes": axes.SIZES},
        "detail plots": drawing.details,
        "quantiles": page_details.QUANTILES,
        "edges": [round_figure(float(edge)) for edge in page_details.EDGES],
        "pool": pool.values,
        "differences": differences(rows),
        "notes": caveats.low_bits(rows) + caveats.habits(rows, results["config"]["reference"]),
        "config": results["config"],
        "commit": commit(),
        "versions": {name: value_of(results, name) for name in ("schema_version", "metrics_version")},
    }


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def render(results: Results, study: Study, drawing: Drawing) -> str:
    """Return the page's text. While jobs still run, the page reloads itself every few seconds."""
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
