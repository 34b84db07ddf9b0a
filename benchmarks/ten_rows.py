#!/usr/bin/env python3
"""Measure one row ten times, on a quiet host or with an intermittent load, to check its interval and its marks.

With --table, write recorded rows as a table; with --shares, how much other programs slowed them.

    python benchmarks/ten_rows.py quiet.json envs/torch/bin/python artifacts/demo/fp16
    python benchmarks/ten_rows.py busy.json envs/torch/bin/python artifacts/demo/fp16 --busy
    python benchmarks/ten_rows.py rows.json --table quiet.json busy.json
    python benchmarks/ten_rows.py shares.json --shares quiet.json busy.json

Each row is a run of scripts/quantmill/latency/measure.py by its engine's interpreter. The load is a process that keeps
a processor busy for 2 to 8 seconds and then rests as long, at random times with a seed. A row is right if its interval
contains the pooled speed of all quiet rows, or of the other rows of its file if there are none.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "scripts"))

from quantmill.common import bounded_json, surroundings  # noqa: E402
from quantmill.common.atomic import write_json  # noqa: E402
from quantmill.common.program import UserError, run  # noqa: E402
from quantmill.metrics.bootstrap import student_t  # noqa: E402

SPIN = "while True: pass"
SPAN = 2.0, 8.0  # seconds for which the load is there, and then is not
PROCESSORS = 2  # of the machine of the recorded rows
KEPT = ("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high")


@contextmanager
def coming_and_going(seed: int) -> Iterator[None]:
    """Run an intermittent load of one processor while the block lasts."""
    ended, draw = threading.Event(), random.Random(seed)

    def spin() -> None:
        while not ended.wait(draw.uniform(*SPAN)):
            with subprocess.Popen([sys.executable, "-P", "-c", SPIN]) as process:
                ended.wait(draw.uniform(*SPAN))
                process.kill()

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure(python: Path, artifact: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one row; return its speed with the interval, its times, and its interference."""
    out = folder / "row.json"
    command = [
        python,
        REPO / "scripts/quantmill",
        "latency.measure",
        artifact,
        out,
        "--engine",
        "transformers",
        "--device",
        "cpu",
    ]
    ids = artifact.parent / "tokens"
    command += ["--prompts", ids / "prompts.json", "--evaluation", ids / "evaluation.json"]
    latency = {name: getattr(options, name) for name in ("new_tokens", "processes", "repeats")}
    latency |= {"decode": "generate", "prompt_tokens": [], "batch_sizes": [1]}
    command += ["--latency", json.dumps(latency)]
    if subprocess.run([str(word) for word in command], cwd=folder, env=surroundings.of_child(command)).returncode:
        raise UserError(f"{artifact}: the row could not be measured; its error stands above")
    found = bounded_json.loads(out.read_bytes())
    runs = found["runs"]
    tokens, seconds = (
        sum(len(each["token_seconds"]) for each in runs),
        sum(each["token_seconds"][-1] for each in runs),
    )
    row = {name: found["summary"][name] for name in KEPT}
    return row | {
        "tokens": tokens,
        "seconds": seconds,
        "interference": found["interference"],
        "protocol": found["protocol"],
    }


def pooled(rows: Sequence[dict[str, Any]]) -> float:
    """Return the pooled tokens per second of several rows."""
    return sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def explain(row: dict[str, Any], truth: float) -> str:
    """Return the row's own explanation of an interval that misses the truth."""
    if row["tokens_per_second_low"] <= truth <= row["tokens_per_second_high"]:
        return ""
    side = "slower" if row["tokens_per_second_high"] < truth else "faster"
    beyond = max(truth / row["tokens_per_second_high"], row["tokens_per_second_low"] / truth) - 1
    why = "marked" if row["interference"] else "nothing in the row says why"
    return f"{side} by {beyond:.1%} beyond its end; {why}"


def table(paths: Sequence[Path]) -> list[dict[str, str]]:
    """Return the table: each measured row, and whether its interval contains the truth."""
    arms = {path.stem: bounded_json.loads(path.read_bytes())["rows"] for path in paths}
    found = []
    for name, rows in arms.items():
        for number, row in enumerate(rows, 1):
            others = (
                arms["quiet"] if name != "quiet" and "quiet" in arms else [each for each in rows if each is not row]
            )
            truth = pooled(others)
            low, high = row["tokens_per_second_low"], row["tokens_per_second_high"]
            found.append(
                {
                    "host": name,
                    "row": str(number),
                    "tokens/s": f"{row['tokens_per_second']:.4g}",
                    "interval": f"{low:.4g} to {high:.4g}",
                    "the truth": f"{truth:.4g}",
                    "holds it": "yes" if low <= truth <= high else "no",
                    "marked": "; ".join(row["interference"]) or "-",
                    "the miss": explain(row, truth) or "-",
                }
            )
    return found


def share(row: dict[str, Any]) -> float:
    """Mean share of the processors that other programs took, over all processes; up to 5% is not recorded."""
    took = [re.search(r"other programs took (\d+)%", reason) for reason in row["interference"]]
    return sum(int(found[1]) for found in took if found) / 100 / row["protocol"]["processes"]


def shares(paths: Sequence[Path]) -> list[dict[str, str]]:
    """Rows of a table, by the share of other programs: the speed over the unmarked rows', and whether it is below
    the 95% interval of another unmarked row (Student's t)."""
    rows = [row for path in paths for row in bounded_json.loads(path.read_bytes())["rows"]]
    quiet = [row["tokens_per_second"] for row in rows if not row["interference"]]
    middle = statistics.fmean(quiet)
    half = student_t(len(quiet) - 1) * statistics.stdev(quiet) * (1 + 1 / len(quiet)) ** 0.5
    spread, chance = (
        f"{min(quiet) / middle:.2f} to {max(quiet) / middle:.2f}",
        f"by chance {1 - half / middle:.2f}",
    )
    found = [("none above 5%", f"{len(quiet)}", spread, chance, "no")]
    for row in sorted((row for row in rows if row["interference"]), key=share):
        speed = row["tokens_per_second"]
        slower = "yes" if speed < middle - half else "no"
        worst = f"{1 - PROCESSORS * share(row):.2f}"
        found.append((f"{share(row):.0%}", "1", f"{speed / middle:.2f}", worst, slower))
    names = ("share of other programs", "rows", "speed", "speed if all threads wait for each other", "below chance")
    return [dict(zip(names, each, strict=True)) for each in found]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("python", type=Path, nargs="?", help="the engine's interpreter")
    arguments.add_argument("artifact", type=Path, nargs="?", help="with tokens/prompts.json next to it")
    arguments.add_argument("--busy", action="store_true", help="with an intermittent load")
    arguments.add_argument("--rows", type=int, default=10)
    arguments.add_argument("--processes", type=int, default=3)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--new-tokens", type=int, default=64)
    arguments.add_argument("--table", type=Path, nargs="+", help="files of rows; OUT becomes their table")
    arguments.add_argument("--shares", type=Path, nargs="+", help="files of rows; OUT becomes the table of shares")
    options = arguments.parse_args()
    if options.shares:
        write_json(options.out, shares(options.shares))
        return
    if options.table:
        write_json(options.out, table(options.table))
        return
    if options.artifact is None:
        arguments.error("name the engine's interpreter and the artifact, or --table")
    rows: list[dict[str, Any]] = []
    for number in range(options.rows):
        with tempfile.TemporaryDirectory() as folder:
            here = options.python.absolute(), options.artifact.absolute(), options, Path(folder)
            if options.busy:
                with coming_and_going(number):
                    rows.append(measure(*here))
            else:
                rows.append(measure(*here))
        write_json(options.out, {"busy": options.busy, "rows": rows})  # what was measured stays, whatever ends it
        print(json.dumps({name: rows[-1][name] for name in (*KEPT, "interference")}), flush=True)


if __name__ == "__main__":
    run(main)
