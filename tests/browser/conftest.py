"""A page made by scripts/quantmill/report/write.py of results whose figures are known, opened in Chromium.

Runs in envs/browser: `envs/browser/bin/python -m pytest --confcutdir tests/browser tests/browser`.
"""

import json
import math
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

REPO = Path(__file__).resolve().parents[2]
TOOLS = REPO / "envs/tools/bin/python"
WINDOWS, TOKENS = 8, 100  # tokens scored in each window
NEW_TOKENS = 4
BOTH = """
import json, sys
from quantmill.report import merge_runs as side_by_side
print(side_by_side.page(*(json.load(open(name)) for name in sys.argv[1:])))
"""
HOSTILE = '</script><img src=x onerror="document.title=1"><b>&amp;'
LATENCY = [
    "ttft_ms_p50",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "tokens_per_second",
    "tokens_per_second_low",
    "tokens_per_second_high",
]

SUMMARY = [*LATENCY, "peak_memory_bytes", "bandwidth_fraction", "joules_per_token"]


def words(folder: Path) -> None:
    """Return a tokenizer of eight words, one of which is markup."""
    vocabulary = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, HOSTILE: 5, "six": 6, "seven": 7}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "zero"}
    content = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}}
    content |= {"post_processor": None, "decoder": None, "model": model, "truncation": None, "padding": None}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def latency(rate: float, outputs: list[list[int]]) -> dict[str, Any]:
    """Return a result of `rate` tokens a second, its interval 10% wide; every token takes as long."""
    summary = dict(zip(LATENCY, (1000 / rate, 1000 / rate, 2000 / rate, rate, 0.95 * rate, 1.05 * rate), strict=True))
    summary |= {"peak_memory_bytes": 10**9, "bandwidth_fraction": 0.25, "joules_per_token": None}
    seconds = [(i + 1) / rate for i in range(NEW_TOKENS)]
    return {
        "kind": "latency",
        "metrics_version": METRICS_VERSION,
        "summary": summary,
        "mode": "plain",
        "compute_type": "float16",
        "deterministic": True,
        "other_modes": [],
        "versions": {"lib": "1.0"},
        "interference": [],
        "conditions": [],
        "lengths": [],
        "batches": [],
        "copy_bandwidth_bytes_per_second": 1e12,
        "device": {"device": "cpu", "name": "a processor", "threads": 2},
        "protocol": {"new_tokens": NEW_TOKENS, "repeats": 1, "processes": 1},
        "prompts": [{"text": f"prompt {HOSTILE}", "tokens": 2, "output_ids": ids} for ids in outputs],
        "runs": [
            {"process": 0, "repeat": 0, "prompt": number, "token_seconds": seconds} for number in range(len(outputs))
        ],
    }


def quality(ratio: float) -> dict[str, Any]:
    """Return a result with perplexity `ratio` times 2 in every window, so that its paired interval is a point."""
    nll = [TOKENS * math.log(2 * ratio) + 10 * math.sin(i) for i in range(WINDOWS)]
    names = ("kld_mean", "kld_median", "kld_p99", "kld_p999", "kld_max", "delta_p_rms")
    summary = {"perplexity": 2 * ratio, "perplexity_low": 1.5, "perplexity_high": 4.0, "top1_agreement": 0.9}
    summary |= dict.fromkeys(names, ratio - 1)
    windows = {"nll": nll, "tokens": [TOKENS] * WINDOWS, "counts": [float(TOKENS)] * WINDOWS}
    return {
        "kind": "quality",
        "metrics_version": METRICS_VERSION,
        "summary": summary,
        "normalised": {},
        "headline": "token_perplexity",
        "total_nll": sum(nll),
        "scored_tokens": TOKENS * WINDOWS,
        "tokens": TOKENS * WINDOWS,
        "words": 1,
        "bytes": 1,
        "windows": windows | {"kld": [TOKENS * (ratio - 1)] * WINDOWS},
        "protocol": {"text_sha256": "x", "perplexity": "gptq-2048"},
    }


def write_cell(
    folder: Path, model: str, name: str, rate: float, ratio: float, size: int, outputs: list[list[int]], *, seen: bool
) -> dict[str, Any]:
    """One model in one format, and its entry in study.json. `seen`: with values of each position."""
    home = folder / f"model{abs(hash(model))}" / name
    home.mkdir(parents=True)
    manifest = {"source": {"kind": "path"}, "bits_per_weight": 8.0, "bytes": size, "build_s": 1.0, "files": {}}
    manifest |= {"tool": "t", "tool_version": HOSTILE, "parameters": {"p": HOSTILE}, "calibration_sha256": None}
    manifest["weight_bytes_per_token"] = size
    (home / "quantmill.json").write_text(json.dumps(manifest | {"gate": None}))
    words(home)
    (home / "latency.json").write_text(json.dumps(latency(rate, outputs) | {"artifact": manifest}))
    (home / "quality.json").write_text(json.dumps(quality(ratio) | {"artifact": manifest}))
    (home / "noise.json").write_text(
        json.dumps(
            {"kind": "noise floor", "metrics_version": METRICS_VERSION, "compute_type": "bfloat16"}
            | {"summary": {"kld_mean": 1e-4}, "windows": {"kld": [TOKENS * 1e-4], "tokens": [TOKENS]}}
        )
    )
    if seen:
        positions = np.full(TOKENS * WINDOWS, 1e-3)
        positions[250] = 0.5  # scored token 50 of the third window
        np.savez(home / "quality.npz", kld=positions, delta_p=positions, nll=positions, top1=positions < 1)
    ids = [place % 5 for place in range((TOKENS + 1) * WINDOWS)]
    evaluation = {"ids": ids, "context": TOKENS + 1, "text_sha256": "x", "bytes": 1, "words": 1}
    (home / "evaluation.json").write_text(json.dumps(evaluation))
    log = home / "log"
    return {
        "model": model,
        "format": name,
        "engine": "fake",
        "artifact": str(home),
        "absent": {},
        **{kind: str(home / f"{kind}.json") for kind in ("latency", "quality", "evaluation")},
        "noise_floor": str(home / "noise.json"),
        "logs": {kind: [str(log)] for kind in ("artifact", "latency", "quality", "noise_floor")},
    }


def build(
    folder: Path,
    models: list[str],
    cells: list[dict[str, Any]],
    reference: str = "reference",
    addresses: int = -1,
    pending: Sequence[str] = (),
    **more: Any,
) -> Path:
    """Make the page of a study. `addresses`: bytes of address space for it; `pending`: files that are still to come,
    while jobs run; `more` of its config."""
    config = {"models": {model: {} for model in models}, "reference": reference, "perplexity": "gptq-2048"} | more
    folder.mkdir(exist_ok=True)
    (folder / "study.json").write_text(json.dumps({"config": config, "cells": cells, "options": "--cores 8"}))
    command = [
        TOOLS,
        "scripts/quantmill",
        "report.write",
        folder / "study.json",
        folder / "report",
        *(["--running"] if pending else []),
    ]
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))  # noqa: E731
    pipes = {"input": json.dumps(list(pending)), "capture_output": True, "text": True}
    result = subprocess.run(command, cwd=REPO, preexec_fn=limit, **pipes)
    assert result.returncode == 0, result.stderr
    return folder / "report" / "index.html"


def side_by_side(before: Path, after: Path, page: Path) -> Path:
    """Make the page of two runs from their pages, as report.compare does, which takes only whole results."""
    files = [each.with_name("results.json") for each in (before, after)]
    made = subprocess.run([TOOLS, "-c", BOTH, *files], cwd=REPO / "scripts", capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    page.write_text(made.stdout)
    return page


METRICS_VERSION = int(
    (REPO / "scripts/quantmill/metrics/__init__.py").read_text().split("METRICS_VERSION = ")[1].split()[0]
)


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models; in the second a measurement failed, and everything that can be markup is.

    tokens/s, perplexity over the reference's, size: reference 100, 1, 16 MB; quick 300, 1.005, 9 MB; small 200, 1.008,
    4 MB; coarse 900, 1.04, 3 MB; poor 50, 1.2, 12 MB, which `coarse` beats in everything.
    """
    folder = tmp_path_factory.mktemp("study")
    rows = {
        "reference": (100, 1, 16, [1, 2, 3, 4]),
        "quick": (300, 1.005, 9, [1, 2, 3, 4]),
        "small": (200, 1.008, 4, [1, 2, 5, 4]),
        "coarse": (900, 1.04, 3, [2, 2, 3, 4]),
        "poor": (50, 1.2, 12, [1, 2, 3, 3]),
    }
    cells = [
        write_cell(folder, "first", name, rate, ratio, size * 10**6, [output, output], seen=True)
        for name, (rate, ratio, size, output) in rows.items()
    ]
    for name in ("reference", "broken"):
        cells.append(write_cell(folder, HOSTILE, name, 100, 1, 10**6, [[1, 2, 3, 4]], seen=False))
    Path(cells[-1]["latency"]).unlink()
    Path(cells[-1]["logs"]["latency"][0]).write_text(f"50%\nerror: the engine {HOSTILE} broke\n")
    return build(folder, ["first", HOSTILE], cells)


@pytest.fixture(scope="session")
def caveats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model whose reference has no latency and no quality, and two formats on two devices, one with caveats."""
    folder = tmp_path_factory.mktemp("caveats")
    rows = {"reference": 100, "doubtful": 300, "elsewhere": 900}
    cells = [write_cell(folder, "only", name, rate, 1, 10**6, [[1, 2, 3, 4]], seen=True) for name, rate in rows.items()]
    for kind in ("latency", "quality"):
        Path(cells[0][kind]).unlink()
    refused = {"mode": "captured", "refused": "its tokens differ", "summary": dict.fromkeys(SUMMARY, 1.0)}
    length = {"tokens": 512, "ttft_ms_p50": 3.0, "tpot_ms_p50": 1.0, "refused": "by 0.9 nats"}
    doubts = {"other_modes": [refused], "interference": ["a neighbour"], "lengths": [length]}
    elsewhere = {"device": {"device": "cpu", "name": "another processor", "threads": 2}}
    for cell, change in ((cells[1], doubts), (cells[2], elsewhere)):
        path = Path(cell["latency"])
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    manifest = Path(cells[1]["artifact"]) / "quantmill.json"
    experts = {"experts": {"count": 8, "few": 64, "below": 2, "unreached": [], "tokens": {"layer": [9, 50, *[99] * 6]}}}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | experts))
    return build(folder, ["only"], cells)


@pytest.fixture(scope="session")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with only one speed, a disturbed one.

    bits per weight, perplexity over the reference's: reference 16, 1; timed 9, 1.03; untimed 8, 1.02; small 5, 1.2.
    """
    folder = tmp_path_factory.mktemp("sizes")
    rows = {"reference": (16, 1), "timed": (9, 1.03), "untimed": (8, 1.02), "small": (5, 1.2)}
    cells = []
    for name, (bits, ratio) in rows.items():
        cell = write_cell(folder, "only", name, 100, ratio, bits * 10**6, [[1, 2, 3, 4]], seen=False)
        manifest = Path(cell["artifact"]) / "quantmill.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"bits_per_weight": bits}))
        cells.append(cell | {"engine": "other" if name == "small" else "fake"})
        if name != "timed":
            Path(cell["latency"]).unlink()
    timed = Path(cells[1]["latency"])
    timed.write_text(json.dumps(json.loads(timed.read_text()) | {"interference": ["a neighbour"]}))
    return build(folder, ["only"], cells)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the system's Chromium."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if not path:
        pytest.skip("no chromium on this machine; Debian's package is called chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page and wait until it is drawn; afterwards it must have said nothing and asked for nothing."""
    said: list[str] = []
    asked: list[str] = []
    pages: list[Page] = []

    def open_page(path: Path, **options: Any) -> Page:
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]", state="attached")
        pages.append(page)
        return page

    yield open_page
    pages = [page for page in pages if not page.is_closed()]
    titles = {page.title() for page in pages}
    for page in pages:
        page.context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert titles <= {"Quantmill: quality versus speed"}  # what markup would have changed


def column(page: Page, name: str) -> list[str]:
    """Return the texts of one column of the table, without the small print."""
    place = page.locator("#table thead th .sort").evaluate_all(
        "(all, id) => all.findIndex((each) => each.id === id)", f"sort-{name}"
    )
    cells = page.locator(f"#table tbody tr > :nth-child({place + 1})")
    return cells.evaluate_all("(all) => all.map((each) => each.firstChild.textContent)")
