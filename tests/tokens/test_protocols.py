"""Each protocol on the demo model against another implementation: lm-eval's own, or a second one of ours."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REPO, interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from quantmill.tokens import wikitext

WIKITEXT = REPO.parent / "shared/data/wiki.test.raw"


def wikitext_of(text: str, size: int) -> str:
    """Return a text in WikiText's form: pages of three paragraphs, spaces around punctuation."""
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    pages, length = [], 0
    while length < size:
        lines = [f"= Page {len(pages)} =", "= = Part = =", *paragraphs[3 * len(pages) : 3 * len(pages) + 3]]
        spaced = [re.sub(r"(\w)-(\w)", r"\1 @-@ \2", re.sub(r"([.,;:!?()])", r" \1 ", line)) for line in lines]
        pages.append("".join(f" {re.sub(' +', ' ', line).strip()} \n \n" for line in spaced))
        length += len(pages[-1])
    return " \n" + "".join(pages)


@pytest.fixture(scope="module")
def fp16(tmp_path_factory: pytest.TempPathFactory, call: Callable, tools_python: Path) -> Path:
    """Build the demo's fp16 artifact."""
    folder = tmp_path_factory.mktemp("protocols")
    steps = (
        *(("fetch.link", REPO / "demo", "source", "--kind", "demo"),),
        *(
            ("checkpoint.to_safetensors", folder / "source", "safetensors"),
            ("build.fp16", folder / "safetensors", "fp16"),
        ),
    )
    for program, source, out, *options in steps:
        result = call(tools_python, "scripts/quantmill", program, source, folder / out, *options)
        assert result.returncode == 0, result.stderr
    return folder / "fp16"


@pytest.fixture(scope="module")
def texts(fp16: Path, call: Callable, torch_python: Path) -> list[Path]:
    """Tokenised: a part of the demo's text, the same in WikiText's form, and pages of WikiText where it is there.

    With each of the last two, its pages as lm-eval's data set splits them.
    """
    plain = (REPO / "config/evaluation.txt").read_text()
    parts = {"plain": plain[:12_000], "like": wikitext_of(plain, 10_000)}
    pages = {"like": [f" = Page{page}" for page in parts["like"].split("\n = Page")[1:]]}
    if WIKITEXT.exists():
        pages["wikitext"] = sorted(wikitext.pages(WIKITEXT.read_text(encoding="utf-8")), key=len)[:6]
        parts["wikitext"] = "\n".join(pages["wikitext"])
    for name, text in parts.items():
        path = fp16.with_name(f"{name}.txt")
        path.write_text(text, encoding="utf-8")
        result = call(
            *(
                torch_python,
                "scripts/quantmill",
                "tokens.tokenize_texts",
                fp16,
                path,
                path.with_suffix(".json"),
                "--as",
                "evaluation",
            )
        )
        assert result.returncode == 0, result.stderr
        rows = "".join(json.dumps({"page": page}) + "\n" for page in pages.get(name, ()))
        path.with_suffix(".jsonl").write_text(rows)
    return [fp16.with_name(f"{name}.json") for name in parts]


@pytest.fixture(scope="module")
def facts(texts: list[Path], fp16: Path, call: Callable, torch_python: Path) -> dict[str, Any]:
    result = call(torch_python, "tests/tokens/protocol_checks.py", fp16, *texts)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def harness(texts: list[Path], fp16: Path, call: Callable) -> list[dict[str, float]]:
    """Return lm-evaluation-harness's figures of the pages."""
    rows = [path.with_suffix(".jsonl") for path in texts[1:]]
    result = call(interpreter("lm-eval"), "benchmarks/lm_eval_wikitext.py", fp16, fp16.with_name("cache"), *rows)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("protocol", ["gptq-2048", "llamacpp-512", "hf-strided"])
def test_perplexity_is_that_of_an_independent_implementation(facts: dict[str, Any], protocol: str) -> None:
    result, (expected, count, *error) = facts["ours"][protocol], facts["independent"][protocol]
    assert result["summary"]["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert result["normalised"]["token_perplexity"] == pytest.approx(expected, rel=1e-4)
    assert result["scored_tokens"] == count
    if protocol == "llamacpp-512":
        assert result["summary"]["perplexity_standard_error"] == pytest.approx(error[0], rel=1e-4)


def test_tensors_are_compared_as_arrays_are(facts: dict[str, Any]) -> None:
    assert facts["tensors"] < 2 * np.finfo(np.float32).eps  # tensors are summed in float32


def check_words(result: dict[str, Any], expected: dict[str, float]) -> None:
    assert result["protocol"]["detokenizer"] == "wikitext"
    assert result["protocol"]["documents"] == expected["sample_len"]
    assert result["summary"]["perplexity"] == pytest.approx(expected["word_perplexity"], rel=1e-4)
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert result["normalised"][name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.slow
def test_words_are_those_of_lm_evaluation_harness(facts: dict[str, Any], harness: list[dict[str, float]]) -> None:
    check_words(facts["pages"][0], harness[0])


@pytest.mark.slow
@pytest.mark.skipif(not WIKITEXT.exists(), reason="WikiText-2's test file is not beside the repository (../shared)")
def test_wikitext_words_agree_with_the_harness(facts: dict[str, Any], harness: list[dict[str, float]]) -> None:
    assert len(wikitext.pages(WIKITEXT.read_text(encoding="utf-8"))) == 62  # as in lm-eval's data set
    check_words(facts["pages"][1], harness[1])


def test_scoring_takes_little_memory(call: Callable, torch_python: Path) -> None:
    shape = ("--hidden", 64, "--layers", 1, "--vocab", 131_072, "--window", 2048, "--rounds", 1, "--threads", 1)
    result = call(torch_python, "benchmarks/scoring.py", *shape)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert 4 * found["vocab"] * found["window"] == 2**30  # bytes of one window's logits, at once
    assert found["memory_mib"] < 200


def test_rows_of_wikitext_give_its_file() -> None:
    raw = wikitext_of((REPO / "config/evaluation.txt").read_text(), 4000)
    rows = [line if line.strip() else "" for line in raw.splitlines(keepends=True)]
    assert "" in rows
    assert wikitext.split(rows) == (wikitext.pages(raw), True)
    pages = wikitext.pages(raw)
    assert wikitext.split(pages) == (pages, True)


def test_other_texts_stay_as_they_are() -> None:
    assert wikitext.split(['A - b, "c".\n', "", "d"]) == (['A - b, "c".\n', "d"], False)


@pytest.mark.parametrize(
    ("page", "written"),
    [
        (" a @-@ b 1 @,@ 000 2 @.@ 5 ", " a-b 1,000 2.5 "),
        (" = = Career = = \n \n Boulter , who \n", " == Career ==\n\nBoulter, who\n"),
        ('( x ) [ y ] { z } " q " the dog \'s', '(x) [y] {z} "q" the dog\'s'),
    ],
)
def test_wikitext_as_one_would_write_it(page: str, written: str) -> None:
    assert wikitext.detokenize(page) == written


# the harness's own, in its order
RULES = (
    *(("s '", "s'"), ("/' [0-9]/", "/'[0-9]/"), (" @-@ ", "-"), (" @,@ ", ","), (r" @\.@ ", ".")),
    *((rf" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    *((r"\(\s*([^\)]*?)\s*\)", r"(\1)"), (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}")),
    *((r"\"\s*([^\"]*?)\s*\"", r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'")),
    *(("= = = =", "===="), ("= = =", "==="), ("= =", "==")),
    *((" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
)


@settings(max_examples=1000)
@given(st.text("/()[]{}\"'=@,.-:N1sa \n\u00b0\u2003\x1c", max_size=60))
def test_any_page_agrees_with_the_harness(page: str) -> None:
    expected = page
    for pattern, replacement in RULES:
        expected = re.sub(pattern, replacement, expected)
    assert wikitext.detokenize(page) == expected


def test_the_harness_rule_with_slashes_is_kept() -> None:
    assert wikitext.detokenize("a/' 5/b") == re.sub("/' [0-9]/", "/'[0-9]/", "a/' 5/b") == "a/'[0-9]/b"


def test_an_open_bracket_before_spaces_is_quick() -> None:
    page = "(" + " " * 1_000_000
    assert wikitext.detokenize(page) == page
    assert wikitext.detokenize("( " * 300_000) == "( " * 300_000


def test_words_are_counted_before_detokenizing() -> None:
    assert wikitext.words(" a @-@ b \n") == 5
