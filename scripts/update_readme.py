#!/usr/bin/env python3
"""Put a run's table into the README, between its markers; with --check, say whether it still is what the files say.

python scripts/update_readme.py README.md results/demo/results.json [--check]
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.program import UserError, parser, run
from reporting.numbers import number, size

BEGIN = "<!-- results: written by `make readme` -->"
END = "<!-- end of results -->"
HEADINGS = (
    *("format", "runs in", "tokens/s (95%)", "perplexity", "over the reference (95%, paired)", "mean KL, nats"),
    *("same first choice", "TTFT, ms", "TPOT, ms", "bits/weight", "size", "Pareto front"),
)


def line(row: Mapping[str, Any], reference: str) -> str:
    """One row of the Markdown table."""
    ratio = row["perplexity_ratio"]
    if row["format"] == reference or ratio is None:
        relative = "the reference" if ratio else number(None)
    elif ratio["tie"]:
        relative = "a tie"
    else:
        relative = f"{number(ratio['ratio'], 5)} ({number(ratio['low'], 5)} to {number(ratio['high'], 5)})"
    rate = (row["tokens_per_second"], row["tokens_per_second_low"], row["tokens_per_second_high"])
    threads = f", {row['threads']} thread{'s' if row['threads'] > 1 else ''}" if row["threads"] else ""
    cells = (
        f"`{row['format']}`",
        f"{row['engine']}, {row['compute_type']}{threads}",
        "{} ({} to {})".format(*(number(value, 3) for value in rate)),
        number(row["perplexity"]),
        relative,
        number(row["kld_mean"], 3),
        number(None) if row["top1_agreement"] is None else f"{number(row['top1_agreement'] * 100, 3)}%",
        number(row["ttft_ms_p50"], 3),
        number(row["tpot_ms_p50"], 3),
        number(row["bits_per_weight"], 3),
        size(row["size_bytes"]),
        {True: "yes", False: "no", None: number(None)}[row["pareto"]],
    )
    return "| " + " | ".join(cells) + " |"


def table(results: Mapping[str, Any]) -> str:
    """The Markdown between the markers: what was measured, on what, and the rows."""
    first = results["rows"][0]
    latency, quality = first["protocol"]["latency"], first["protocol"]["quality"]
    protocol = (
        f"On {first['device']}, batch 1, {latency['new_tokens']} new tokens after each prompt, {latency['repeats']} "
        f"repeats in each of {latency['processes']} processes"
    )
    if quality:
        protocol += (
            f"; perplexity by `{quality['perplexity']}` over {quality['windows']} windows of {quality['window']} tokens"
        )
    rows = [line(row, results["config"]["reference"]) for row in results["rows"]]
    heading = "| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS)
    return "\n".join([f"{protocol}.", "", heading, *rows])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("readme", type=Path)
    arguments.add_argument("results", type=Path, help="results.json of a run")
    arguments.add_argument("--check", action="store_true", help="change nothing; fail where the README has drifted")
    options = arguments.parse_args()

    text = options.readme.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise UserError(f"{options.readme}: lacks the markers {BEGIN!r} and {END!r}; put them back")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    results = json.loads(options.results.read_text(encoding="utf-8"))
    updated = f"{before}{BEGIN}\n{table(results)}\n{END}{after}"
    if options.check and updated != text:
        raise UserError(f"{options.readme}: its table is not what {options.results} says; run make readme")
    if not options.check:
        options.readme.write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    run(main)
