"""Documents: links lead somewhere, the map is whole, the README is short, versions agree."""

import csv
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from quantmill.environments.versions import list_versions
from quantmill.report.labels import label
from quantmill.report.results import hash_files

REPO = Path(__file__).resolve().parents[2]
FOLDERS = (".", "config", "demo", "docs", "results/*")
PAGES = sorted(str(page.relative_to(REPO)) for folder in FOLDERS for page in REPO.glob(f"{folder}/*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
MOST_WORDS = 1100  # of the README, as `wc -w` counts them


def prose(page: Path) -> str:
    """Return a page without its blocks of code, whose brackets are not links."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as web sites that show Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name: str) -> None:
    page = REPO / name
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name}: {link}"
        assert not anchor or anchor in anchors(target), f"{name}: {link}"


@pytest.mark.parametrize("name", PAGES)
def test_rows_of_tables_have_all_cells(name: str) -> None:
    """Cells beyond those of the head are not shown."""
    for table in re.findall(r"(?:^\|.*\n)+", prose(REPO / name) + "\n", re.MULTILINE):
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert set(cells) == {cells[0]}, f"{name}: {table.splitlines()[0]}"


def test_the_map_names_every_page_of_docs() -> None:
    linked = set(LINK.findall((REPO / "docs/README.md").read_text()))
    assert {path.name for path in (REPO / "docs").glob("*.md")} - {"README.md"} <= linked


def test_the_readme_is_short() -> None:
    assert len((REPO / "README.md").read_text().split()) <= MOST_WORDS
    tables = re.findall(r"(?:^\|.*\n)+", (REPO / "README.md").read_text(), re.MULTILINE)
    assert [len(table.splitlines()) - 2 for table in tables] == [8]


def test_versions_agree() -> None:
    version = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((REPO / "CITATION.cff").read_text())["version"] == version
    assert f"\n## [{version}]" in (REPO / "CHANGELOG.md").read_text()


def test_recorded_versions_match_pins_and_results() -> None:
    assert json.loads((REPO / "results/versions.json").read_text()) == list_versions(REPO)


def test_two_gpus_gave_the_same_files_and_scores() -> None:
    """Formats that were built on each: the hash of their files, and every figure of quality, of every window."""
    rows = [
        {label(row): row for row in json.loads((REPO / f"results/{study}/results.json").read_text())["rows"]}
        for study in ("smollm2-h200", "smollm2-h100")
    ]
    scored = {name for name, row in rows[1].items() if row["perplexity"]}
    both = scored & rows[0].keys()
    assert len(both) == 18 and scored - both == {"gptq-int4", "awq-int4", "autoround-int4"}
    for name in both:
        row, other = rows[1][name], rows[0][name]
        scores = [key for key in row if key.startswith(("quality_", "perplexity", "kld_", "nll_", "top1", "delta_p"))]
        assert {key: row[key] for key in scores} == {key: other[key] for key in scores}, name
        assert row["artifact"]["files_sha256"] == other["artifact"]["files_sha256"], name

    plain = json.loads((REPO / "results/smollm2-h100/others/quality-ct-w4a16-without-triton.json").read_text())
    assert hash_files(plain["artifact"])["files_sha256"] == rows[1]["ct-w4a16"]["artifact"]["files_sha256"]
    assert plain["summary"] == rows[1]["ct-w4a16"]["quality_summary"]


def test_an_epyc_and_a_xeon_gave_the_same_scores() -> None:
    """Two formats differ, as results/smollm2 says, and one of them in its files."""
    folder = REPO / "results/smollm2"
    with (folder / "others/results-on-an-epyc.csv").open(newline="") as file:
        epyc = {row["format"]: float(row["perplexity"]) for row in csv.DictReader(file)}
    xeon = {row["format"]: row for row in json.loads((folder / "results.json").read_text())["rows"]}
    other = {name for name, row in xeon.items() if row["perplexity"] != pytest.approx(epyc[name], rel=1e-8)}
    assert len(epyc) == 8 and epyc.keys() == xeon.keys() and other == {"ct2-int8", "gptq-int4"}
    before = {name: json.loads((folder / f"others/{name}-on-an-epyc.json").read_text()) for name in other}
    files = {name: row["artifact"]["files_sha256"] for name, row in before.items()}
    assert files["ct2-int8"] == xeon["ct2-int8"]["artifact"]["files_sha256"]
    assert files["gptq-int4"] != xeon["gptq-int4"]["artifact"]["files_sha256"]


def test_formats_are_as_fast_as_by_hand() -> None:
    files = (REPO / "results/h200-served/in-one-process").glob("*.json")
    found = {path.stem: json.loads(path.read_text()) for path in files}
    assert len(found) == 16
    off = {name for name, ways in found.items() if ways["row"]["speed"] != pytest.approx(1, abs=0.05)}
    assert off == {"transformers-bnb-nf4-dq"}
    three = 3  # prompts a round
    rounds = {name: len(ways["row"]["ms"]) / three for name, ways in found.items()}
    assert {rounds[name] for name in found if name.startswith("vllm")} == {40}
    long = {name for name in found if rounds[name] == 14}
    assert long == {"transformers-bnb-nf4", "transformers-torchao-int8"}
    assert {rounds[name] for name in found if name.startswith("transformers")} == {14, 6}
    assert [found[name]["row"]["speed"] for name in long] == pytest.approx([1, 1], abs=0.01)


def test_step_profiles_are_as_the_page_says() -> None:
    profiles = json.loads((REPO / "results/h200-served/step-profile.json").read_text())
    found = {each["format"]: each for each in profiles if each["model"] == "llama-7b"}

    def shares(name: str, number: int) -> float:
        return sum(each["share"] for each in found[name]["largest"][:number])

    plain, nf4, int8 = found["fp16"], found["bnb-nf4"], found["bnb-int8"]
    assert plain["gpu_ms"] < plain["ms"] / 5
    products = shares("fp16", 2) * plain["gpu_ms"], shares("bnb-nf4", 1) * nf4["gpu_ms"]
    assert products[0] == pytest.approx(products[1], rel=0.02)
    assert int8["kernels"] / plain["kernels"] == pytest.approx(2, rel=0.05)
    names = [each["kernel"] for each in int8["largest"]]
    assert any("or_kernel" in name for name in names) and any("DtoH" in name for name in names)
    assert found["torchao-int8"]["gpu_ms"] / plain["gpu_ms"] == pytest.approx(4, rel=0.05)
    assert shares("torchao-fp8", 3) == pytest.approx(0.9, abs=0.02)
    assert all(found[name]["gpu_ms"] > 0.8 * found[name]["ms"] for name in ("torchao-fp8", "hqq-int4"))


@pytest.mark.parametrize(
    "path", sorted(REPO.glob("results/*/*.svg")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_recorded_plots_were_drawn(path: Path) -> None:
    """A plot that could not be drawn holds a sentence instead."""
    assert "could not be drawn" not in path.read_text()


@pytest.mark.parametrize("path", sorted(REPO.glob("results/*/results.json")), ids=lambda path: path.parent.name)
def test_recorded_results_name_no_folder_of_the_machine(path: Path) -> None:
    texts = json.loads(path.read_text())["config"]["texts"].values()
    models = json.loads(path.read_text())["config"]["models"].values()
    named = [name for each in [texts, *(model.get("texts", {}).values() for model in models)] for name in each if name]
    assert named and not [name for name in named if name.startswith(("/", ".."))]
