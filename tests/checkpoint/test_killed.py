"""Conversions that are killed at any moment: no partial result is ever taken for a whole one, and a rerun mends all."""

import random
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO
from workflows import ROUNDS, check_whole

from quantmill.checkpoint import sharding, torch_zip
from quantmill.checkpoint.tensor import Tensor, row_major

KILLS = 20 * ROUNDS
SHARD = 8 * 2**20  # bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight .bin shards of noise."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    noise = folder / "noise"
    noise.write_bytes(np.random.default_rng(0).bytes(8 * SHARD))
    shape = (SHARD // 4096, 2048)
    tensors = [Tensor(f"layers.{n}", "F16", shape, row_major(shape), noise, n * SHARD) for n in range(8)]
    sharding.write(folder, "bin", [[tensor] for tensor in tensors], torch_zip.write)
    return folder


def weights(folder: Path) -> dict[str, str]:
    """Return the hashes of the weights under the final name, after checking that the folder is whole."""
    return {name: sha for name, sha in check_whole(folder).items() if name.endswith(".safetensors")}


@pytest.mark.long
def test_a_killed_conversion(model: Path, tmp_path: Path, tools_python: Path) -> None:
    out = tmp_path / "out"
    command = [tools_python, REPO / "scripts/quantmill", "checkpoint.to_safetensors", model, out, "--verify"]

    def finish() -> float:
        """Seconds of a run that is left alone."""
        start = time.monotonic()
        subprocess.run(command, check=True)
        return time.monotonic() - start

    seconds = finish()
    whole = shutil.copytree(out, model.with_name("whole"))
    expected = weights(out)
    assert len(expected) == 8

    moments, killed, found = random.Random(0), 0, 0
    while killed < KILLS:
        if killed % 4 == 0:  # three in four begin with an artifact there already
            shutil.rmtree(out, ignore_errors=True)
        elif not out.exists():
            shutil.copytree(whole, out)
        process = subprocess.Popen(command)
        try:
            process.wait(moments.uniform(0, 1.1 * seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
        if out.exists():
            assert weights(out) == expected
            found += 1
        if killed % 10 == 0:
            seconds = finish()
            assert weights(out) == expected
    assert found > KILLS / 4
    finish()
    assert weights(out) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]  # nothing is left of what was killed
