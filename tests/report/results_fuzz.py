"""Run in envs/tools: change recorded results at random places and have report.compare --page and report.collect read
them.

    python tests/report/results_fuzz.py SEED COUNT

Prints as JSON how often each program finished, refused in one line, or failed otherwise, and what failed. Values have
mostly the type of what they stand for, so that the schema lets many pass. Nothing is drawn: that is another process's.
"""

import contextlib
import copy
import io
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

from quantmill.common.program import UserError  # noqa: E402
from quantmill.report import collect, compare, drawing  # noqa: E402

STUDIES = {"demo": (0, 1, 3), "smollm2-tasks": (0, 1), "h200-served": (0, 2), "smollm2-h100": (0, 1, 12, 28)}
WINDOWS = 6
NUMBERS = [0, -1, 1, 5, 10**6, 2**53, 2**63 - 1, 2**63, 10**400, 1e308, -1e308, 5e-324, 1e-60, 1e60, 0.5, -0.5, 1.0]
TEXTS = ["", "\ud800", "x\x00y", "a" * 30_000, "</script>", "\x1b[2J\n", "gptq-2048", "fp16"]
LISTS: list[Any] = [[], [[]], [None] * WINDOWS, [0] * WINDOWS, [1e60] * WINDOWS, ["x"], [1, 2]]
OBJECTS: list[Any] = [{}, {"a": 1}, {"\udfff": 1}, {"texts": {"evaluation": None}}, {"gate": {"faithful": 3}}]
ANY = [None, True, *NUMBERS, *TEXTS, *LISTS, *OBJECTS]


def recorded(name: str, rows: tuple[int, ...]) -> dict[str, Any]:
    """Return some rows of a recorded study, with few windows, tasks and loads."""
    content = json.loads((REPO / f"results/{name}/results.json").read_text())
    content["rows"] = [content["rows"][place] for place in rows]
    content |= {kind: content[kind][:3] for kind in ("tasks", "loads") if kind in content}
    content["config"]["memory_at"] = {"context": 100, "users": 2, "budget_gb": 1.0}
    for row in content["rows"]:
        row["memory_at"] = {"context": 100, "users": 2, "weights_bytes": 10**6, "kv_cache_bytes": 10, "reason": None}
        if row["quality_windows"]:
            row["quality_windows"] = {each: values[:WINDOWS] for each, values in row["quality_windows"].items()}
            row["protocol"]["quality"]["windows"] = WINDOWS
    return content


def places(content: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a file, leaves and what holds them."""
    for key in content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ():
        yield (*where, key)
        yield from places(content[key], (*where, key))


def nasty(value: Any, random: random.Random) -> Any:
    """Another value, mostly of the same type."""
    kinds = ((bool, [None, True, False]), (int | float, NUMBERS), (str, TEXTS), (list, LISTS), (dict, OBJECTS))
    same = next((each for kind, each in kinds if isinstance(value, kind)), ANY)
    return copy.deepcopy(random.choice(ANY if random.random() < 0.15 else [None, *same]))


def change(content: Any, where: tuple[Any, ...], random: random.Random) -> None:
    """Replace, remove or repeat what is at a place."""
    for key in where[:-1]:
        content = content[key]
    way, last = random.random(), where[-1]
    if way < 0.1:
        del content[last]
    elif way < 0.2 and isinstance(content, list):
        content.append(copy.deepcopy(content[last]))
    else:
        content[last] = nasty(content[last], random)


def outcome(program: Any, *arguments: str) -> str:
    """Return how a program ended."""
    sys.argv = ["program", *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            program.main()
    except UserError as error:
        return "refused" if "\n" not in str(error) else f"several lines: {error}"
    except SystemExit:  # report.compare's status
        pass
    except Exception as error:
        return f"{program.__name__}: {type(error).__name__}: {error!s:.200}"
    return "finished"


def main() -> None:
    seed, count = map(int, sys.argv[1:])
    # what is drawn has to be JSON all the same
    drawing.draw = lambda rows, loads=False: drawing.Drawing(json.dumps(rows, allow_nan=False), "", b"")
    draw = random.Random(seed)
    good = [recorded(name, rows) for name, rows in STUDIES.items()]
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in ("good", "bad"):
            (folder / each).mkdir()
        paths = [str(folder / each / "results.json") for each in ("good", "bad")]
        for _ in range(count):
            base = draw.choice(good)
            bad = copy.deepcopy(base)
            change(bad, draw.choice([*places(bad)]), draw)
            for path, content in zip(paths, (base, bad), strict=True):
                Path(path).write_text(json.dumps(content))
            page, out = str(folder / "page.html"), str(folder / "out")
            for ended in (
                outcome(compare, *draw.sample(paths, 2), "--page", page),
                outcome(collect, *draw.sample(paths, draw.choice((1, 2))), "--out", out),
            ):
                found[ended] += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main()
