"""results.parquet: the columns of results.csv with their types, and each row's study and protocol."""

import hashlib
import json
from collections.abc import Sequence

import pyarrow as pa

from quantmill.report.column import Column
from quantmill.report.columns import COLUMNS
from quantmill.report.rows import Results, value_of

TYPES = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "array": pa.list_(pa.string()),
}
# so that the rows of many studies can stand in one table: column -> type and description
STUDY = {
    "results_sha256": ("string", "SHA-256 of the results.json that the row is of: one a report."),
    "config_sha256": ("string", "SHA-256 of the study's config as JSON without spaces, its keys sorted."),
    "schema_version": ("integer", "Of results.json."),
    "metrics_version": ("integer", "Rows of different versions are not comparable."),
    "perplexity_protocol": ("string", "Perplexities of different protocols are not comparable."),
    "text_sha256": ("string", "SHA-256 of the evaluation text."),
    "new_tokens": ("integer", "Tokens decoded after each prompt."),
}


def schema(columns: Sequence[Column] = COLUMNS) -> pa.Schema:
    """Return types, descriptions and units of the columns; every one may be null."""
    fields = [
        pa.field(
            column.name,
            TYPES[column.kind],
            metadata={"description": column.text} | ({"unit": column.unit} if column.unit else {}),
        )
        for column in columns
    ]
    fields += [pa.field(name, TYPES[type_], metadata={"description": text}) for name, (type_, text) in STUDY.items()]
    return pa.schema(fields)


def table(results: Results, results_sha256: str, columns: Sequence[Column] = COLUMNS) -> pa.Table:
    """Return the rows of results.json, whose file has the given hash. What was not measured is null."""
    config = json.dumps(results["config"], sort_keys=True, separators=(",", ":"))
    study = {
        "results_sha256": results_sha256,
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        "schema_version": results["schema_version"],
        "metrics_version": results["metrics_version"],
    }
    rows = []
    for row in results["rows"]:
        latency, quality = row["protocol"]["latency"] or {}, row["protocol"]["quality"] or {}
        protocol = {
            "perplexity_protocol": quality.get("perplexity"),
            "text_sha256": quality.get("text_sha256"),
            "new_tokens": latency.get("new_tokens"),
        }
        rows.append({**{column.name: value_of(row, column.name) for column in columns}, **study, **protocol})
    return pa.Table.from_pylist(rows, schema=schema(columns))
