"""Run the whole workflow on a machine without a network, only by the commands of docs/CLUSTER.md.

The bundles are packed here, with the package index. Everything after that runs in a network namespace without
interfaces, with an empty home and another Python for Snakemake.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_fixtures import OFF
from conftest import CHARACTERS, REPO, interpreter

NEWER = [f"3.{minor}" for minor in range(12, 15)]
STUDY = """
models: {{demo: {{source: demo}}}}
formats: [fp16]
texts: {{evaluation: short.txt}}
latency: {{new_tokens: 4, repeats: 1, processes: 1}}
{interpreters}
"""


def another_python() -> tuple[str, Path]:
    """Return the version and the path of a newer Python of this machine."""
    for version in NEWER:
        installed = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python{version}"))
        found = [*installed, *filter(None, [shutil.which(f"python{version}")])]
        for each in found:
            check = subprocess.run([each, "-c", "import venv, sys; print(sys.version)"], capture_output=True, text=True)
            if check.stdout.startswith(version):
                return version, Path(each)
    pytest.skip(f"no Python of {', '.join(NEWER)} is installed")


def commands(heading: str) -> list[list[str]]:
    """Return the blocks of commands below a heading of docs/CLUSTER.md, each a list of lines."""
    text = (REPO / "docs/CLUSTER.md").read_text().partition(f"### {heading}\n")[2]
    text = re.split(r"^#+ ", text, flags=re.MULTILINE)[0]
    return [
        [line[4:] for line in block.splitlines() if line]
        for block in re.findall(r"(?:^    .*\n|^\n)+", text, re.MULTILINE)
        if block.strip()
    ]


@pytest.mark.slow
def test_the_docs_work_without_a_network(checkout: Callable[..., Path], tmp_path: Path) -> None:
    if not OFF:
        pytest.skip("this user may make no network namespace (unshare -rn)")
    version, python = another_python()
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    pack, install, wrap, config, start = commands("The whole workflow")
    root = checkout()

    # Here: the bundles. That of `tools` is for the Python that has torch, which stands for the system's.
    for line, target in zip(pack, (version, here), strict=True):
        words = shlex.split(line.replace("3.12", target))
        make, _, env, options = words
        name = env.removeprefix("ENV=")
        assert (make, words[1]) == ("make", "bundle")
        command = [
            sys.executable,
            "scripts/quantmill",
            "environments.bundle",
            f"envs/{name}.txt",
            f"artifacts/bundles/{name}",
        ]
        command += shlex.split(options.removeprefix("OPTIONS="))
        result = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if result.returncode and re.search(r"establish a new connection|name resolution|dns error", result.stderr):
            pytest.skip("the package index cannot be reached")
        assert result.returncode == 0, result.stderr

    # There.
    (tmp_path / "bin").mkdir()
    (tmp_path / f"bin/python{version}").symlink_to(python)
    (tmp_path / f"bin/python{here}").symlink_to(sys._base_executable)
    (tmp_path / "home").mkdir()
    there = {"/opt/quantmill": str(tmp_path / "opt"), "/usr/bin/python3": str(interpreter("torch"))}

    def adapt(line: str) -> str:
        """Return a line of the docs with this machine's places and Pythons."""
        for place, mine in there.items():
            line = line.replace(place, mine)
        return line.replace("3.12", version if ".venv" in line else here)

    (root / "short.txt").write_text((root / "config/evaluation.txt").read_text()[:CHARACTERS])
    (root / "study.yaml").write_text(STUDY.format(interpreters=adapt(config[0])))
    script = "\n".join(["set -eu", *map(adapt, [*install, *wrap]), *(line.replace("8", "2") for line in start)])
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "HOME": str(tmp_path / "home"),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "PYTHONPATH": str(tmp_path / "nowhere"),
    }
    result = subprocess.run([*OFF, "sh", "-c", script], cwd=root, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (root / "artifacts/report/index.html").is_file()
    running = subprocess.run([root / ".venv/bin/python", "--version"], capture_output=True, text=True).stdout
    assert running.startswith(f"Python {version}.")
