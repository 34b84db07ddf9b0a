"""Model card: a head that the hub reads, and a text whose figures are the report's rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from quantmill.common.atomic import MANIFEST
from quantmill.common.program import printable
from quantmill.publish import contents, public, usage
from quantmill.publish.contents import PLOT, STUDY, Artifact
from quantmill.report import page_header
from quantmill.report.column import Column
from quantmill.report.columns import COLUMNS, shown_columns
from quantmill.report.labels import label
from quantmill.report.markdown import SAME, cells, lines, load_lines
from quantmill.report.numbers import MISSING
from quantmill.report.rows import Row

TEMPLATE = Path(__file__).with_name("model_card.md.j2")
TASK = "text-generation"
QUALITIES = ("perplexity", "kld_mean", "top1_agreement")  # columns of a row that the head holds
SPEEDS = ("tokens_per_second", "ttft_ms_p50", "tpot_ms_p50")
CALIBRATION = {"samples": "samples", "sequence_length": "tokens each"}  # parameter -> its words on the card
OF_QUALITY = ("perplexity", "windows", "window", "text_sha256", "unit")  # keys of the protocols, for the head
OF_SPEED = ("batch", "new_tokens", "repeats", "processes", "decoding")


def render(
    repository: str,
    model: str,
    layout: str,
    library: str,
    artifacts: Sequence[Artifact],
    results: Mapping[str, Any],
    licence: Mapping[str, str],
    base_model: str | None,
    commit: str | None,
    hashes: Mapping[str, Mapping[str, Any]],
    shown: public.Public,
) -> str:
    """Return the card of a repository.

    Args:
        results: from `public.results`. licence: from `licence.find`. base_model: repository of the hub, if known.
        commit: of Quantmill. hashes: each file's size and SHA-256. shown: copies manifests without private facts.
    """
    rows, config = results["rows"], results["config"]
    head = ModelCardData(
        base_model=base_model,
        base_model_relation="quantized" if base_model else None,
        **licence,
        library_name=library,
        pipeline_tag=TASK,
        tags=["quantmill", layout, *(each.name for each in artifacts)],
        model_name=repository.partition("/")[2],
        eval_results=evaluations(rows, config) or None,
    )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE.name).render(
        head=head.to_yaml(),
        repository=repository,
        model=model,
        base_model=base_model,
        artifacts=[about(each, shown) for each in artifacts],
        tables=tables(rows, config["reference"], config),
        loads=load_lines(results.get("loads", ())),
        reference=config["reference"],
        plot=PLOT,
        usages=usages(rows, artifacts, repository),
        missing=reasons(rows),
        warnings=[(label(row), escape(each)) for row in rows for each in row["warnings"]],
        source=shown.value(public.source(artifacts[0].manifest["source"]), MANIFEST, "source"),
        calibration=calibrations(artifacts, config),
        texts=[f"`{text}`" for text in config["texts"].values() if isinstance(text, str)],
        hashes=hashes,
        study=STUDY,
        commit=commit,
        targets=" ".join(f"artifacts/{model}/{each.name}" for each in artifacts),
    )


def escape(text: str) -> str:
    """Escape a text of a log or a device for a cell of Markdown."""
    return printable(text).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def about(artifact: Artifact, shown: public.Public) -> dict[str, Any]:
    """Return the card's facts about how an artifact was made."""
    found = contents.facts(artifact, shown)
    words = {name: value for name, value in found["parameters"].items() if not isinstance(value, dict | list)}
    said = ", ".join(f"{name} {value}" for name, value in words.items()) or "no parameters"
    return {
        "name": artifact.name,
        "tool": escape(f"{found['tool']} {found['tool_version']}"),
        "parameters": escape(said),
        "bits": found["bits_per_weight"],
        "files": list(artifact.files),
    }


def conditions(row: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the conditions of a row: device, load, protocol of the perplexity, and text."""
    latency, quality = row["protocol"]["latency"], row["protocol"]["quality"]
    parts = [row["device"] and f"on {row['device']}", latency and page_header.load(latency)]
    if quality:
        parts.append(f"perplexity by {page_header.scoring(quality)} of {text_name(config, 'evaluation')}")
        parts.append(f"its SHA-256 {quality['text_sha256'][:16]}")
    return "; ".join(filter(None, parts)) or "not measured"


def text_name(config: Mapping[str, Any], kind: str) -> str:
    """Return the name of a text of a published study."""
    text = config["texts"].get(kind)
    if isinstance(text, dict):
        return f"{text['hub']} ({text['file']})"
    return f"a text of the study's ({text})" if text else f"Quantmill's {kind} text"


def tables(rows: Sequence[Row], reference: str, config: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return conditions, each with the lines of a Markdown table of the rows that were measured under them."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(conditions(row, config), []).append(row)
    return [(escape(words), table_lines(group, reference)) for words, group in groups.items()]


def table_lines(rows: Sequence[Row], reference: str) -> list[str]:
    """Return a table of the columns that a report shows at once, without those that no row has."""
    found = [cells(row, reference) for row in rows]
    known = [name for name in max(found, key=len) if name not in ("model", "device")]
    headings = [name for name in known if any(row.get(name, MISSING) not in (MISSING, SAME) for row in found)]
    body = [[escape(row.get(name, MISSING)) for name in headings[1:]] for row in found]
    named = [[f"`{label(row)}`", *line] for row, line in zip(rows, body, strict=True)]
    return lines(headings, named)


def reasons(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return rows with reasons: what disturbed their speed, and why they lack figures that the report shows at once."""
    shown = {column.name for column in shown_columns()} - {"run", "group_size"}
    found = [(label(row), each) for row in rows for each in row["interference"] or ()]
    found += [(label(row), why) for row in rows for name, why in row["missing"].items() if name in shown]
    return [(name, escape(why)) for name, why in dict.fromkeys(found)]


def usages(
    rows: Sequence[Mapping[str, Any]], artifacts: Sequence[Artifact], repository: str
) -> list[tuple[str, str, str]]:
    """Return row, engine with versions, and how to run it there, for each engine that was measured."""
    by_name = {each.name: each for each in artifacts}
    found = []
    for row in rows:
        if row["device"] is None and row["quality_summary"] is None:
            continue
        told = {name: text for name, text in (row["versions"] or {}).items() if name != "arguments"}  # kernels too
        versions = ", ".join(f"{name} {text}" for name, text in told.items())
        found.append(
            (label(row), escape(versions or row["engine"]), usage.describe(row, by_name[row["format"]], repository))
        )
    return found


def calibrations(artifacts: Sequence[Artifact], config: Mapping[str, Any]) -> list[str]:
    """Return a sentence about the calibration of each artifact that was calibrated."""
    name, found = text_name(config, "calibration"), []
    for each in artifacts:
        if digest := each.manifest["calibration_sha256"]:
            parameters = each.manifest["parameters"]
            counts = [f"{parameters[key]} {what}" for key, what in CALIBRATION.items() if key in parameters]
            found.append(f"`{each.name}`: {name}, SHA-256 `{digest}`{''.join(f', {count}' for count in counts)}")
    return found


def evaluations(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[EvalResult]:
    """Return the figures for the hub's model-index: quality on the evaluation text, speed after the prompts."""
    columns = {column.name: column for column in COLUMNS}
    found = []
    for row in rows:
        latency, quality = row["protocol"]["latency"], row["protocol"]["quality"]
        if quality:
            text = config["texts"].get("evaluation")
            hub = text if isinstance(text, dict) else {}
            said = {key: quality[key] for key in OF_QUALITY if key in quality}
            dataset = {
                "dataset_type": hub.get("hub", "text"),
                "dataset_name": f"{hub.get('hub', 'evaluation text')} (SHA-256 {quality['text_sha256'][:16]})",
                "dataset_revision": hub.get("revision"),
                "dataset_args": {"file": hub["file"]} if hub else None,
            }
            found += [result(row, columns[name], dataset, said) for name in QUALITIES if row[name] is not None]
        if latency and not row["interference"] and row["deployed_tokens_per_second"] == row["tokens_per_second"]:
            said = {"device": row["device"]} | {key: latency[key] for key in OF_SPEED if key in latency}
            hashed = latency.get("prompts_sha256", "")
            dataset = {"dataset_type": "prompts", "dataset_name": f"prompts (SHA-256 {hashed[:16]})"}
            found += [result(row, columns[name], dataset, said) for name in SPEEDS if row[name] is not None]
    return found


def result(row: Mapping[str, Any], column: Column, dataset: Mapping[str, Any], said: Mapping[str, Any]) -> EvalResult:
    """Return one figure of a row."""
    return EvalResult(
        task_type=TASK,
        task_name="Text generation",
        **dataset,
        metric_type=column.name,
        metric_name=f"{column.heading}, {label(row)} in {row['engine']}",
        metric_value=row[column.name],
        metric_args=dict(said),
    )
