"""The importance matrix is of the calibration text, in pieces that the model was made for."""

import json
from collections.abc import Callable
from pathlib import Path

from workflows import SNAKEMAKE

from quantmill.checkpoint import gguf_file


def options(model: Path, calibration: str = "calibration", **more: object) -> list[object]:
    words = {"text": model / f"{calibration}.txt", "calibration": model / f"{calibration}.json"}
    words |= {"evaluation": model / "evaluation.json", "samples": 2, "sequence-length": 2048} | more
    return [part for name, value in words.items() for part in (f"--{name}", value)]


def test_pieces_are_no_longer_than_the_context(
    gguf_model: Path, build_gguf: Callable, run_gguf: Callable, tmp_path: Path
) -> None:
    """The demo's context is 512; beyond it activations are not what they are when it is used."""
    result = run_gguf("build.imatrix", build_gguf("f16"), tmp_path / "imatrix", *options(gguf_model))
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "imatrix/quantmill.json").read_text())
    assert record["parameters"] == {"samples": 2, "sequence_length": 512}
    metadata = gguf_file.read_all(tmp_path / "imatrix/imatrix.gguf").metadata
    assert (metadata["imatrix.chunk_size"], metadata["imatrix.chunk_count"]) == (512, 2)


def test_the_evaluation_text_is_refused(
    gguf_model: Path, build_gguf: Callable, run_gguf: Callable, tmp_path: Path
) -> None:
    result = run_gguf("build.imatrix", build_gguf("f16"), tmp_path / "out", *options(gguf_model, "evaluation"))
    assert result.returncode == 1
    assert "the calibration text shares 32 tokens in a row with the evaluation text" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_random_weights_have_none(call: Callable, checkout: Callable[[], Path]) -> None:
    """No text means anything to them: types that can do without it are planned so, the others refused in a line."""
    root = checkout()
    study = "models: {big: {source: {random: config/examples/llama-1.1b.json}}}\nformats: [%s]\n"

    def plan(format: str) -> tuple[int, str]:
        (root / "study.yaml").write_text(study % format)
        target = f"artifacts/big/{format}"
        result = call(SNAKEMAKE, "-n", "-p", target, "--configfile", "study.yaml", cwd=root)
        return result.returncode, result.stdout + result.stderr

    status, said = plan("gguf-q4_k_m")
    assert status == 0
    assert '"type": "q4_k_m"' in said
    assert "--imatrix" not in said and "rule imatrix" not in said
    for format in ("gguf-iq2_m", "gguf-mixed"):
        status, said = plan(format)
        assert status == 1
        last = said.splitlines()[-1]
        assert last == f"error: {format}: needs an importance matrix; big has random weights; remove it"
