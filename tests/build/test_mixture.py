"""gguf-mixed: the types that are chosen, and what they are worth."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workflows import SNAKEMAKE

from quantmill.checkpoint import gguf_file
from quantmill.common.program import UserError
from quantmill.llamacpp import mixture
from quantmill.llamacpp.mixture import Choice


def tensors(seed: int, count: int = 5, types: int = 4) -> dict[str, list[Choice]]:
    """Draw tensors with types of random sizes. Larger types lose less, except for one pair."""
    chance = random.Random(seed)
    found = {}
    for number in range(count):
        sizes = sorted(chance.sample(range(1, 60), types))
        losses = sorted((chance.random() for _ in sizes), reverse=True)
        losses[0], losses[1] = losses[1], losses[0]
        found[f"t{number}"] = [Choice(f"Q{place}", *each) for place, each in enumerate(zip(sizes, losses, strict=True))]
    return found


def totals(choices: list[Choice]) -> tuple[int, float]:
    return sum(choice.nbytes for choice in choices), sum(choice.kld for choice in choices)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    """Every mixture is tried, for budgets from too few bytes to more than enough."""
    classes = tensors(seed)
    every = [totals(list(choices)) for choices in itertools.product(*classes.values())]
    for budget in range(5, 300, 7):
        fitting = [loss for size, loss in every if size <= budget]
        if not fitting:
            with pytest.raises(UserError, match=r"^the smallest types of all tensors take .* bytes, and .* are left"):
                mixture.choose(classes, budget)
            continue
        size, loss = totals(list(mixture.choose(classes, budget).values()))
        assert size <= budget
        assert loss == pytest.approx(min(fitting))


@pytest.mark.parametrize("seed", range(5))
def test_large_budgets_are_rounded_and_kept(seed: int) -> None:
    """Sizes of a model of seven billion weights: the choice is the best mixture up to a unit a tensor."""
    classes = {
        name: [choice._replace(nbytes=choice.nbytes * 10_000_019) for choice in choices]
        for name, choices in tensors(seed).items()
    }
    every = [totals(list(choices)) for choices in itertools.product(*classes.values())]
    for budget in (900_000_000, 1_200_000_000, 2_000_000_000):
        size, loss = totals(list(mixture.choose(classes, budget).values()))
        assert size <= budget
        less = budget - len(classes) * (budget // mixture.UNITS + 1)
        assert loss <= min(kld for nbytes, kld in every if nbytes <= less)


def test_types_that_fit_to_the_byte_are_taken() -> None:
    classes = {"a": [Choice("Q4_K", 3_000_001, 0.5)], "b": [Choice("Q4_K", 5, 1), Choice("Q8_0", 9, 0.1)]}
    assert [choice.nbytes for choice in mixture.choose(classes, 3_000_006).values()] == [3_000_001, 5]


@pytest.fixture(scope="module")
def sensitivity(gguf_model: Path, build_gguf: Callable, run_gguf: Callable) -> Path:
    """Run build.gguf_sensitivity on the demo."""
    out = gguf_model / "sensitivity.json"
    build_gguf("q4_k_m")  # and with it the importance matrix
    words = {"base": build_gguf("f16"), "imatrix": gguf_model / "imatrix", "device": "cpu", "threads": 1}
    words |= {kind: gguf_model / f"{kind}.json" for kind in ("calibration", "evaluation")}
    options = [part for name, value in words.items() for part in (f"--{name}", value)]
    result = run_gguf("build.gguf_sensitivity", gguf_model / "safetensors", out, *options)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="module")
def mix(gguf_model: Path, build_gguf: Callable, run_gguf: Callable, sensitivity: Path) -> Callable[..., Any]:
    """Build a mixture."""

    def build(out: Path, size: str | float = "q4_k_m", *options: object) -> Any:
        how = ["--parameters", json.dumps({"size": size}), "--base", build_gguf("f16")]
        how += ["--imatrix", gguf_model / "imatrix", "--sensitivity", sensitivity, *options]
        return run_gguf("build.gguf", gguf_model / "safetensors", out, *how)

    return build


@pytest.fixture(scope="module")
def mixed(gguf_model: Path, mix: Callable) -> Path:
    """Return the demo's mixture, as large as Q4_K_M."""
    result = mix(gguf_model / "gguf-mixed")
    assert result.returncode == 0, result.stderr
    return gguf_model / "gguf-mixed"


STUDY = """models: {demo: {source: demo}}
formats: [fp16, gguf-mixed]
gguf_mixed: {size: %s}
variants: {gguf-mixed-4: {format: gguf-mixed, size: 4.0}}
"""


def plan(call: Callable, root: Path, size: str) -> Any:
    """Return a dry run of a study of mixtures."""
    (root / "study.yaml").write_text(STUDY % size)
    targets = [f"artifacts/demo/{name}" for name in ("gguf-mixed", "gguf-mixed-4")]
    return call(SNAKEMAKE, "-n", "-p", *targets, "--configfile", "study.yaml", cwd=root)


def test_a_study_says_how_large_mixtures_are(call: Callable, checkout: Callable[[], Path]) -> None:
    """A size is a type or bits a weight; one measurement and one importance matrix serve both."""
    planned = plan(call, checkout(), "iq4_xs")
    assert planned.returncode == 0, planned.stderr
    commands = [line for line in (planned.stdout + planned.stderr).splitlines() if "build.gguf" in line]
    (mixed,) = [line for line in commands if "--format=gguf-mixed " in line]
    (four,) = [line for line in commands if "--format=gguf-mixed-4 " in line]
    shared = "--imatrix=artifacts/demo/imatrix --sensitivity=artifacts/demo/gguf-sensitivity.json"
    assert """'--parameters={"size": "iq4_xs"}'""" in mixed
    assert """'--parameters={"size": 4.0}'""" in four
    assert shared in mixed and shared in four


def test_an_unknown_size_ends_with_one_line(call: Callable, checkout: Callable[[], Path]) -> None:
    result = plan(call, checkout(), "q4km")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "error: gguf-mixed: unknown size 'q4km'; did you mean 'q4_k_m'?"
    assert "Traceback" not in result.stderr


def test_a_change_is_measured_from_its_layer_on(gguf_model: Path, run_gguf: Callable) -> None:
    """A matrix with noise in a model of which only later layers are calculated again, and in a whole one, in numpy."""
    result = run_gguf("tests/build/sensitivity_checks.py", gguf_model / "safetensors")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout.splitlines()[-1])
    assert [first for first, _, _ in facts.values()] == [0, 3, 6, 7]
    for _, measured, by_hand in facts.values():
        assert measured == pytest.approx(by_hand, rel=1e-3)


@pytest.mark.slow
def test_estimates_are_what_is_measured(sensitivity: Path) -> None:
    """Types of which the divergence was estimated, not measured, from 2 bits a weight to 8."""
    content = json.loads(sensitivity.read_text())
    assert len(content["tensors"]) == 51  # 7 layers of 7 matrices, embeddings and head
    assert len(content["checks"]) == 8
    assert content["median_error"] < 0.15
    for check in content["checks"]:
        assert check["estimate"] == pytest.approx(check["measured"], rel=0.4)


@pytest.mark.slow
def test_the_mixture_is_what_was_chosen(mixed: Path, build_gguf: Callable) -> None:
    chosen = dict(line.split("=") for line in (mixed / "tensor-types.txt").read_text().splitlines())
    stored = gguf_file.read_all(mixed / "model.gguf").tensors
    found = {f"^{name.replace('.', chr(92) + '.')}$": record.type.lower() for name, record in stored.items()}
    assert len(chosen) == 51
    assert {name: found[name] for name in chosen} == chosen
    theirs = build_gguf("q4_k_m") / "model.gguf"
    assert 0.995 * theirs.stat().st_size < (mixed / "model.gguf").stat().st_size <= theirs.stat().st_size
    record = json.loads((mixed / "quantmill.json").read_text())
    assert (record["format"], record["parameters"]["as_large_as"]) == ("gguf-mixed", "q4_k_m")


@pytest.mark.slow
def test_a_mixture_loses_less_than_q4_k_m(
    gguf_model: Path, build_gguf: Callable, run_gguf: Callable, mixed: Path, tmp_path: Path
) -> None:
    """On the evaluation text, which neither the importance matrix nor the sensitivity is of; at most so much."""
    scored = ["--evaluation", gguf_model / "evaluation.json", "--device", "cpu", "--threads", 1]
    kept, source = tmp_path / "kept", gguf_model / "safetensors"
    own = ["--engine", "transformers", "--write-reference", kept]
    result = run_gguf("quality.measure", source, tmp_path / "own.json", *own, *scored)
    assert result.returncode == 0, result.stderr
    loss = {}
    for artifact in (build_gguf("q4_k_m"), mixed):
        out = tmp_path / f"{artifact.name}.json"
        result = run_gguf("quality.measure", artifact, out, "--engine", "llama_cpp", "--reference", kept, *scored)
        assert result.returncode == 0, result.stderr
        loss[artifact.name] = json.loads(out.read_text())["summary"]["kld_mean"]
    assert loss["gguf-mixed"] <= 0.8 * loss["gguf-q4_k_m"]
    estimate = json.loads((mixed / "quantmill.json").read_text())["parameters"]["estimated_kld"]
    assert estimate == pytest.approx(loss["gguf-mixed"], rel=0.3)  # what tensors cost alone adds up


@pytest.mark.slow
def test_bits_are_those_of_the_file(mix: Callable, tmp_path: Path) -> None:
    result = mix(tmp_path / "out", 4.5)
    assert result.returncode == 0, result.stderr
    assert 4.45 < json.loads((tmp_path / "out/quantmill.json").read_text())["bits_per_weight"] <= 4.5


@pytest.mark.slow
def test_too_few_bits_are_refused(mix: Callable, tmp_path: Path) -> None:
    result = mix(tmp_path / "out", 1.9)
    assert result.returncode == 1
    assert "error: the smallest types of all tensors take" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_measurements_of_another_matrix_are_refused(mix: Callable, sensitivity: Path, tmp_path: Path) -> None:
    other = json.loads(sensitivity.read_text()) | {"imatrix_sha256": "0"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    result = mix(tmp_path / "out", "q4_k_m", "--sensitivity", tmp_path / "other.json")
    assert result.returncode == 1
    assert "was measured with another importance matrix than" in result.stderr.splitlines()[-1]
