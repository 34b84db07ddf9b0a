"""No interpreter that we start reads the folder that its user works in, or what the user tells Python."""

import ast
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import REPO
from workflows import LATENCY, SHORT, study

from quantmill.common import surroundings

# modules of the standard library, of packages and of ours, which children import
NAMES = [
    *("json", "typing", "pathlib", "re", "struct", "signal", "socket", "pickle", "subprocess", "multiprocessing"),
    *("runpy", "venv", "pip", "yaml", "numpy", "torch", "tqdm", "transformers", "tokenizers", "snakemake"),
    *("quantmill", "common", "latency", "loads", "report", "engines", "sitecustomize", "usercustomize"),
]
SETTINGS = {
    "PYTHONSAFEPATH": "1",
    "PYTHONOPTIMIZE": "2",
    "PYTHONUTF8": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONBREAKPOINT": "latency.stop",
    "PYTHONSTARTUP": "latency.py",
    "PYTHONHOME": "/nonexistent",
    "PYTHONWARNINGS": "error",
    "PYTHONINSPECT": "1",
    "LC_ALL": "C",
    "VIRTUAL_ENV": "/nonexistent",
}
ODD = "a b$c'd\"é"  # a folder's name


def traps(folder: Path, names: list[str]) -> Path:
    """Write modules that write a file and end the program when they are imported; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    caught = folder / "caught"
    for name in names:
        line = f"open({str(caught)!r}, 'a').write({name!r} + ' ' + ascii(__import__('sys').orig_argv) + chr(10))"
        (folder / f"{name}.py").write_text(f"{line}\nraise SystemExit('a trap')\n")
    return caught


def sites(python: Path) -> list[Path]:
    """Return the folder of an environment's packages."""
    return list((python.parent.parent / "lib").glob("python3*/site-packages"))


class Trapped(NamedTuple):
    """A clone at an odd path, an environment, and what was caught: traps in the clone, in PYTHONPATH, in the home."""

    clone: Path
    environment: dict[str, str]
    caught: Callable[[], str]


@pytest.fixture
def trapped(checkout: Callable[..., Path], tmp_path: Path) -> Trapped:
    clone = checkout(tmp_path / ODD)
    (clone / ".venv").symlink_to(REPO / ".venv")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    home, paths = tmp_path / "home", tmp_path / "paths"
    folders = [home / f".local/lib/python{version}/site-packages", paths, clone]
    caught = [traps(folder, NAMES) for folder in folders]
    environment = os.environ | SETTINGS | {"HOME": str(home), "PYTHONPATH": str(paths), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONNOUSERSITE", None)
    return Trapped(clone, environment, lambda: "".join(file.read_text() for file in caught if file.exists()))


def make(trapped: Trapped, *words: str) -> subprocess.CompletedProcess[str]:
    """`make`, in the clone."""
    command = ["make", "--assume-old=.venv/.complete", *words]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(command, cwd=trapped.clone, env=trapped.environment, **pipes)


def test_a_clone_at_an_odd_path_ignores_traps(trapped: Trapped, torch_python: Path, tools_python: Path) -> None:
    """The packages of torch's environment come from a wrapper script that sets PYTHONPATH over another Python."""
    clone = trapped.clone
    wrapper = clone / "my python"
    packages = next((torch_python.parent.parent / "lib").glob("python3*/site-packages"))
    wrapper.write_text(f'#!/bin/sh\nexport PYTHONPATH={packages}\nexec {torch_python.resolve()} "$@"\n')
    wrapper.chmod(0o755)
    text = "models: {small: {source: {random: demo/config.json}}}\nformats: [fp16]\ndevice: cpu\n"
    study(clone, text + SHORT + LATENCY)
    config = clone / "my study.yaml"
    config.write_text((clone / "study.yaml").read_text().replace(str(torch_python), "./my python"))
    done = make(trapped, "report", f"CONFIG={config.name}", "CORES=2")
    assert done.returncode == 0, done.stdout + done.stderr + trapped.caught()
    assert trapped.caught() == ""
    found = json.loads((clone / "artifacts/small/latency/fp16.json").read_text())
    assert found["versions"]["torch"] == version_of_torch(torch_python)
    assert (clone / "artifacts/report/index.html").is_file()


def version_of_torch(python: Path) -> str:
    code = "import importlib.metadata; print(importlib.metadata.version('torch'))"
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_an_environment_is_built_among_traps(trapped: Trapped, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    command = [
        sys.executable,
        REPO / "scripts/quantmill",
        "environments.create",
        tmp_path / "empty.txt",
        tmp_path / "env",
    ]
    # without what make and the workflow remove
    environment = {name: value for name, value in trapped.environment.items() if name[:6] != "PYTHON"}
    built = subprocess.run(command, cwd=trapped.clone, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert trapped.caught() == ""
    assert (tmp_path / "env/bin/python").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["report", "CONFIG=no study.yaml"], "config error: models"),
        (["serve-command", "CELL=$a 'b'", "CONFIG=no study.yaml"], "config error: models"),
        (["report", "CONFIG=none.yaml"], "error: config: none.yaml: No such file or directory; name a study's YAML"),
        (["report", "CONFIG=demo"], "error: config: demo: is a folder, not a file; put a file there"),
        (["report", "CONFIG=latin.yaml"], "error: config: latin.yaml: is not YAML ('utf-8' codec can't decode"),
        (["serve-command", "CELL=x", "CONFIG=none.yaml"], "error: config: none.yaml: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_make_reports_a_wrong_study_among_traps(trapped: Trapped, words: list[str], line: str) -> None:
    (trapped.clone / "no study.yaml").write_text("models: {}\n")
    (trapped.clone / "latin.yaml").write_bytes(b"models: {d\xe9: {source: demo}}\n")
    done = make(trapped, *words, "CORES=1")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert [each for each in done.stderr.splitlines() if "error: " in each and line in each], done.stderr
    assert trapped.caught() == ""


@pytest.mark.parametrize("target", ["report", "plan", "serve-command"])
def test_make_passes_a_study_as_one_word(target: str) -> None:
    config, cell = 'my $study\'s "own" é.yaml', "m/$a b'c"
    words = ["make", "--dry-run", "--assume-old=.venv/.complete", target, f"CONFIG={config}", f"CELL={cell}"]
    shown = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=True).stdout
    commands = [shlex.split(line) for line in shown.splitlines()]
    assert any(config in command for command in commands)
    assert any(cell in command for command in commands) == (target == "serve-command")


def test_only_the_same_interpreter_keeps_a_wrappers_environment() -> None:
    here = {"PATH": "/bin", "PYTHONPATH": ":/packages:", "PYTHONHOME": "/home/python", "PYTHONSAFEPATH": "1"}
    module = [sys.executable, "-P", "-m", "pip"]
    assert surroundings.of_child(module, here) == here | {"PYTHONPATH": "/packages"}
    nothing = {"PATH": "/bin", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}
    assert surroundings.of_child(["/opt/python", *module[1:]], here) == nothing
    # the same program by the name of another environment, which has no wrapper
    assert surroundings.of_child([Path(sys.executable), *module[1:]], here) == nothing


def test_a_child_gets_no_path_of_our_modules() -> None:
    here = {"PYTHONPATH": os.pathsep.join([str(REPO / "scripts"), "/packages"])}
    theirs = surroundings.of_child([sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"], here)
    assert theirs == {"PYTHONPATH": "/packages", "PYTHONSAFEPATH": "1"}


def words(node: ast.AST) -> list[list[object]]:
    """Yield each list in a program that could be a command: its words, with None for expressions."""
    lists = [each for each in ast.walk(node) if isinstance(each, (ast.List, ast.Tuple))]
    calls = [ast.List(each.args) for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [[getattr(word, "value", None) for word in each.elts] for each in (*lists, *calls)]


# other programs with -m or -c: llama.cpp's, and a shell
OTHERS = {"imatrix.py", "perplexities.py", "llama_bench.py", "gguf_build.py"}


def test_programs_run_without_the_current_folder() -> None:
    found = 0
    for file in sorted([*(REPO / "scripts").rglob("*.py"), *(REPO / "benchmarks").rglob("*.py")]):
        for command in words(ast.parse(file.read_text())) if file.name not in OTHERS else []:
            for place, word in enumerate(command):
                if word in ("-m", "-c"):
                    assert place and command[place - 1] in ("-P", "-I"), f"{file}: {command}"
                    found += 1
    assert found > 10


RAW = {
    "common/program.py": "the one way",
    "servers/guard.py": "it outlives what it guards; its environment is surroundings.of_child's",
    "servers/lifecycle.py": "the same",
    "servers/supervisor.py": "it has its starter's environment",
    "environments/create.py": "its environment is surroundings.of_child's",
    "llamacpp/compile.py": "the same of pip; the others are no Python",
    "exllamav3/compile.py": "nvcc",
    "report/page.py": "git",
}


def test_programs_are_started_by_one_function() -> None:
    raw = {
        str(file.relative_to(REPO / "scripts/quantmill"))
        for file in (REPO / "scripts/quantmill").rglob("*.py")
        for each in ast.walk(ast.parse(file.read_text()))
        if isinstance(each, ast.Call) and ast.unparse(each.func).startswith(("subprocess.", "os.exec", "os.system"))
        if not ast.unparse(each.func).endswith(("Expired", "CompletedProcess"))
    }
    assert raw == RAW.keys()
