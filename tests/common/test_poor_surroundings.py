"""Programs where a temporary folder, shared memory or the user's home cannot be used: they work all the same."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import REPO, interpreter
from whole_results import whole_cell

pytestmark = pytest.mark.slow

# in its own mount namespace, so that no other folders change
SURROUNDINGS = {
    "full TMPDIR": "mount -t tmpfs -o size=64k tmpfs $F && export TMPDIR=$F && head -c 60k /dev/zero > $F/rest",
    "no TMPDIR": "export TMPDIR=$F/none",
    "read-only TMPDIR": "mount -t tmpfs -o ro tmpfs $F && export TMPDIR=$F",
    "no /dev/shm": "mount -t tmpfs -o ro tmpfs /dev/shm",
    "read-only HOME": "mount -t tmpfs -o ro tmpfs $F && export HOME=$F",
    "no HOME": "export HOME=/proc/none",
}
TEXT = "The river rose in the night and the bridge was gone by morning. " * 180


def command_in(surroundings: Sequence[str], folder: Path) -> list[str]:
    """Return the beginning of a command that runs its rest in such surroundings."""
    script = ["set -e"]
    for number, name in enumerate(surroundings):
        (folder / f"poor-{number}").mkdir(exist_ok=True)
        script += [f"F={folder}/poor-{number}", SURROUNDINGS[name]]
    return ["unshare", "-m", "sh", "-c", "\n".join([*script, 'exec "$@"']), "poor"]


@pytest.fixture(scope="module", autouse=True)
def namespace() -> None:
    """Skip where there can be no mount namespace."""
    made = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"nothing can be mounted here (root can): {made.stderr.strip()}")


def commands(folder: Path) -> list[list[object]]:
    """Programs and their arguments, each with what the ones before it made in `folder`; without a quality gate."""
    torch, tools, mlc = (interpreter(name) for name in ("torch", "tools", "mlc"))
    engine = ["--engine", "transformers", "--device", "cpu", "--threads", 1]
    st, fp16, evaluation = folder / "safetensors", folder / "fp16", folder / "evaluation.json"
    q4f16_1 = ["--device", "cpu", "--parameters", '{"quantization": "q4f16_1"}']
    texts = ["--prompts", folder / "prompts.json", "--evaluation", evaluation]
    short = {"new_tokens": 2, "repeats": 1, "processes": 1, "decode": "generate"}
    latency = ["--latency", json.dumps(short | {"prompt_tokens": [], "batch_sizes": [1]})]
    kept = ["--write-reference", folder / "kept"]
    return [
        [tools, "checkpoint.to_safetensors", REPO / "demo", st, "--verify"],
        [tools, "build.fp16", st, fp16],
        [torch, "tokens.tokenize_texts", st, folder / "text.txt", evaluation, "--as", "evaluation"],
        [torch, "tokens.tokenize_texts", st, folder / "prompts.txt", folder / "prompts.json", "--as", "prompts"],
        [torch, "build.ct2", fp16, folder / "ct2", "--parameters", '{"quantization": "int8"}'],
        [mlc, "mlc.compile", st, folder / "library.so", "--device", "cpu"],
        [mlc, "build.mlc", st, folder / "mlc", "--library", folder / "library.so", *q4f16_1],
        [torch, "quality.measure", fp16, folder / "quality.json", "--evaluation", evaluation, *engine, *kept],
        [torch, "latency.measure", fp16, folder / "latency.json", *texts, *engine, *latency],
        [tools, "report.write", folder / "study.json", folder / "report"],
    ]


@pytest.mark.parametrize(
    "surroundings",
    [
        ("full TMPDIR", "no /dev/shm", "read-only HOME"),
        ("read-only TMPDIR", "no HOME"),
        ("no TMPDIR",),
    ],
    ids=", ".join,
)
def test_every_program_works_in_poor_surroundings(surroundings: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    (folder / "prompts.txt").write_text("The river rose\n")
    cells = [whole_cell(tmp_path / "cells", name, 10, [1.0] * 30) for name in ("fp16", "other")]
    config = {"reference": "fp16", "models": {"m": {}}, "perplexity": "gptq-2048"}
    (folder / "study.json").write_text(json.dumps({"config": config, "cells": cells, "options": "--cores 8"}))
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    for python, program, *arguments in commands(folder):
        command = [*command_in(surroundings, tmp_path), python, REPO / "scripts/quantmill", program, *arguments]
        result = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{program}: {result.stderr}"
        # nothing of its temporary files is left
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")], program
