"""docs/ADDING_A_FORMAT.md, followed to the letter: its files copied out of the page, run, and found in the report."""

import csv
import json
import re
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, interpreter
from workflows import SNAKEMAKE

PROGRAM = "scripts/quantmill/build/rtn.py"
BLOCK = re.compile(r"^`([\w./]+)`[^\n]*:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECOND, SCHEMA = "## A format with a layout of its own", "config/config.schema.yaml"
LIMIT = 1.5  # times the reference's perplexity: rounding loses less


@pytest.fixture(scope="module")
def root(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the finished demo, with the files of the page."""
    root = shutil.copytree(demo, tmp_path_factory.mktemp("adding") / "demo", symlinks=True)
    files = files_of(page(root).partition(SECOND)[0])
    assert set(files) == {"rules/formats/rtn.smk", PROGRAM}
    assert named(files) == listed("a format that an engine here runs")
    add(root, files)
    return root


def page(root: Path) -> str:
    return (root / "docs/ADDING_A_FORMAT.md").read_text()


def files_of(text: str) -> dict[str, str]:
    """Return the files that a part of the page shows, by their paths."""
    return dict(BLOCK.findall(text))


def add(root: Path, files: dict[str, str]) -> None:
    """Write new files."""
    for name, text in files.items():
        assert not (root / name).exists()
        (root / name).write_text(text)


@pytest.fixture(scope="module")
def output(root: Path, call: Callable) -> str:
    """Return Snakemake's output when the new format joins a finished study."""
    before = stamps(root)
    (line,) = re.findall(r"^```yaml\n(formats: .*)\n```$", page(root), re.MULTILINE)
    config = (root / "config/config.yaml").read_text()
    (root / "config/config.yaml").write_text(re.sub("^formats: .*", line, config, flags=re.MULTILINE))
    result = call(SNAKEMAKE, "--cores", "8", "report", cwd=root)
    assert result.returncode == 0, result.stderr
    assert before.items() <= stamps(root).items()
    return result.stdout + result.stderr


def stamps(root: Path) -> dict[Path, int]:
    """When each file that a job made was last written, the report's and Snakemake's apart."""
    made = (path for path in (root / "artifacts").rglob("*") if path.is_file())
    return {
        path: path.stat().st_mtime_ns
        for path in made
        if not {"report", "logs", ".snakemake", ".lock"} & set(path.parts)
    }


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the float16 tensors of a folder of safetensors, read as the format's description says."""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                assert entry["dtype"] == "F16"
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = np.frombuffer(data[begin:end], "<f2").reshape(entry["shape"])
    return found


def raw(path: Path, name: str, dtype: str, as_numpy: str) -> np.ndarray:
    """Return one tensor of a file of safetensors."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])[name]
    assert entry["dtype"] == dtype
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    return np.frombuffer(data[begin:end], as_numpy).reshape(entry["shape"])


def assert_nearest(source: np.ndarray, stored: np.ndarray, group: int) -> None:
    """Each stored weight is, up to float16's rounding, a level of its group, and none is nearer to the source's."""
    for row, rounded in zip(source.astype(np.float64), stored.astype(np.float64), strict=True):
        for start in range(0, len(row), group):
            values, result = row[start : start + group], rounded[start : start + group]
            largest = max(abs(value) for value in values)
            levels = [step * largest / 7 for step in range(-7, 8)]
            slack = largest * 2.0**-11 + 2.0**-24
            to_level = np.min([np.abs(result - level) for level in levels], axis=0)
            nearest = np.min([np.abs(values - level) for level in levels], axis=0)
            assert np.all(to_level <= slack)
            assert np.all(np.abs(values - result) <= nearest + slack)


def test_the_new_row_is_in_the_report(root: Path, output: str) -> None:
    with (root / "artifacts/report/results.csv").open() as file:
        table = {row["format"]: row for row in csv.DictReader(file)}
    assert list(table) == ["fp16", "rtn-int4"]
    reference, ours = (float(row["perplexity"]) for row in table.values())
    assert reference < ours < LIMIT * reference
    assert float(table["rtn-int4"]["kld_mean"]) > 1e-3
    assert float(table["rtn-int4"]["tokens_per_second"]) > 0
    assert table["rtn-int4"]["bits_per_weight"] == table["fp16"]["bits_per_weight"]
    assert float(table["rtn-int4"]["bits_per_weight"]) == pytest.approx(16, abs=0.1)
    gate = json.loads((root / "artifacts/demo/rtn-int4/quantmill.json").read_text())["gate"]
    assert gate["factor"] == 100
    assert gate["reference"] < gate["perplexity"] < LIMIT * gate["reference"]
    assert gate["faithful"] == {"divergence": 0, "tolerance": 1e-5, "against": "its own weights"}


def test_only_the_new_formats_jobs_ran(output: str) -> None:
    ran = re.findall(r"^(?:local)?rule (\w+):$", output, re.MULTILINE)
    assert sorted(ran) == ["artifact", "latency", "page", "quality", "report", "study"]
    assert re.findall(r"(?:artifact|cell)=([\w-]+)", output) == ["rtn-int4"] * 3


def test_weights_are_nearest_levels_others_are_untouched(root: Path, output: str) -> None:
    source, stored = (weights(root / "artifacts/demo" / name) for name in ("fp16", "rtn-int4"))
    assert source.keys() == stored.keys()
    rounded = {name for name in source if re.search(r"layers\.\d+\..*_proj\.weight$", name)}
    assert len(rounded) == 7 * 7
    for name in rounded:
        assert np.mean(source[name] != stored[name]) > 0.8
        assert_nearest(source[name], stored[name], 128)
    assert all(source[name].tobytes() == stored[name].tobytes() for name in source.keys() - rounded)


@pytest.mark.parametrize(("inputs", "group"), [(384, 128), (96, 32), (40, 8), (3, 1)])
def test_inputs_that_128_does_not_divide(
    root: Path, call: Callable, torch_python: Path, tmp_path: Path, inputs: int, group: int
) -> None:
    matrix = np.random.default_rng(inputs).normal(0, 0.02, (6, inputs)).astype("<f2")
    matrix[0] = 0
    shape = {"dtype": "F16", "shape": matrix.shape, "data_offsets": [0, matrix.nbytes]}
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": shape}).encode()
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + matrix.tobytes())
    manifest = {"source": {}, "parameter_count": matrix.size, "weight_bytes_per_token": matrix.nbytes}
    (source / "quantmill.json").write_text(json.dumps(manifest))
    result = call(torch_python, "scripts/quantmill", "build.rtn", source, tmp_path / "out", cwd=root)
    assert result.returncode == 0, result.stderr
    (stored,) = weights(tmp_path / "out").values()
    assert not stored[0].any()
    assert_nearest(matrix, stored, group)
    assert (group == 1) == np.array_equal(stored, matrix)


def test_the_gate_refuses_a_build_that_is_broken(
    root: Path, output: str, call: Callable, torch_python: Path, tmp_path: Path
) -> None:
    program = root / PROGRAM
    original = program.read_text()
    broken = original.replace("keepdims=True) / 7", "keepdims=True) * 7")  # rounds every weight to zero
    assert broken != original
    demo = root / "artifacts/demo"
    gate = ["--gate-reference", demo / "expected.json", "--gate-evaluation", demo / "tokens/evaluation.json"]
    gate += ["--engine", "transformers", "--layout", "hf"]
    program.write_text(broken)
    try:
        result = call(torch_python, "scripts/quantmill", "build.rtn", demo / "fp16", tmp_path / "out", *gate, cwd=root)
    finally:
        program.write_text(original)
    assert result.returncode == 1
    assert re.search(r"^error: .*out: refused by the quality gate: .*its perplexity is \d", result.stderr, re.MULTILINE)
    assert not list(tmp_path.iterdir())


ENGINE = {
    "rules/engines/mine.smk": 'ENGINES["mine"] = Engine(env="mine", loads=("hf",))\n',
    "scripts/quantmill/engines/mine.py": "from quantmill.engines.transformers import Engine as Engine\n",
}
STUDY = """formats: [fp16, fp8-block]
variants: {fp8-b64: {format: fp8-block, block_size: 64}}
runs: {mine: {engine: mine, formats: [fp16]}}"""


@pytest.fixture(scope="module")
def artifact(demo: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build and score the second format in another copy of the demo, with the page's files, and score a new engine."""
    root = shutil.copytree(demo, tmp_path_factory.mktemp("layout") / "demo", symlinks=True)
    text = page(root).partition(SECOND)[2].partition("\n## ")[0]
    (key,) = re.findall(r"^```yaml\n(  \w+:\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    pins = (root / "envs/gptqmodel.txt").read_text()  # has these packages, and its environment is there already
    layout = files_of(text) | {"envs/fp8.txt": pins}
    engine = ENGINE | {"envs/mine.in": "-r torch.in\n", "envs/mine.txt": (root / "envs/torch.txt").read_text()}
    assert named(layout) | {SCHEMA} == listed("a format with a layout of its own")
    assert named(engine) == listed("an engine")
    add(root, layout | engine)
    schema = (root / SCHEMA).read_text()
    assert schema.count("\nproperties:\n") == 1
    (root / SCHEMA).write_text(schema.replace("\nproperties:\n", f"\nproperties:\n{key}"))
    config = root / "config/config.yaml"
    study = re.sub("^formats: .*", STUDY, config.read_text(), flags=re.MULTILINE)
    assert study.count("interpreters: {") == 1
    pythons = f'"fp8": "{interpreter("gptqmodel")}", "mine": "{interpreter("torch")}", '
    config.write_text(study.replace("interpreters: {", f"interpreters: {{{pythons}"))
    scored = [f"artifacts/demo/quality/{name}.json" for name in ("fp8-b64", "fp16@mine")]
    result = call(SNAKEMAKE, "--cores", "8", *scored, cwd=root)
    assert result.returncode == 0, result.stderr
    return root / "artifacts/demo/fp8-b64"


def named(files: Iterable[str]) -> set[str]:
    """Return paths with NAME in place of the new file's own name."""
    return {re.sub(r"\w+(\.\w+)$", r"NAME\1", name) for name in files}


def listed(kind: str) -> set[str]:
    """Return the files that CONTRIBUTING.md lists for an addition."""
    table = (REPO / "CONTRIBUTING.md").read_text().partition("### What a new format or engine touches")[2]
    (row,) = re.findall(rf"^\| {kind} \| (.*) \|$", table, re.MULTILINE)
    return set(re.findall("`(.*?)`", row))


def test_a_new_engine_scores_as_transformers(artifact: Path) -> None:
    mine, reference = (
        json.loads((artifact.parent / f"quality/{name}.json").read_text()) for name in ("fp16@mine", "fp16")
    )
    assert mine["engine"] == "mine"
    assert mine["summary"]["perplexity"] == reference["summary"]["perplexity"]


def test_a_layout_of_its_own_passes_the_gate(artifact: Path) -> None:
    made = json.loads((artifact / "quantmill.json").read_text())
    assert (made["engine"], made["parameters"]["block_size"]) == ("accelerate", 64)
    assert made["gate"]["faithful"]["against"] == "its own weights"
    assert made["gate"]["faithful"]["divergence"] <= made["gate"]["faithful"]["tolerance"]
    quality = json.loads((artifact.parent / "quality/fp8-b64.json").read_text())["summary"]
    assert 1e-6 < quality["kld_mean"] < 0.01


def test_each_block_holds_the_nearest_float8(artifact: Path) -> None:
    """e4m3 as arXiv:2209.05433 defines it: four bits of exponent with bias 7, three of mantissa, no infinities."""
    name = "model.layers.0.mlp.up_proj.weight"
    source = weights(artifact.parent / "fp16")[name].astype(np.float64)
    (path,) = artifact.glob("*.safetensors")
    stored, scales = raw(path, name, "F8_E4M3", "u1"), raw(path, f"{name}_scale_inv", "F32", "<f4")
    assert scales.shape == tuple(-(-side // 64) for side in source.shape)
    bits = np.arange(127)
    exponent, mantissa = bits >> 3, bits & 7
    levels = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa * 2.0**-9)
    assert levels.max() == 448
    for row in range(0, len(source), 64):
        for column in range(0, len(source[0]), 64):
            values, codes = (each[row : row + 64, column : column + 64] for each in (source, stored))
            scale = float(scales[row // 64, column // 64])
            assert scale == pytest.approx(np.abs(values).max() / 448, rel=1e-6)
            magnitudes = np.abs(values) / scale
            nearest = np.min(np.abs(magnitudes[..., None] - levels), axis=-1)
            held = levels[codes & 127]
            assert np.all(np.abs(magnitudes - held) <= nearest + 1e-4 * held)  # float32's rounding of a tie
            assert np.all((codes >> 7 == 1) == (values < 0))
