"""No interpreter that we start reads the folder that its user works in, or what the user tells Python."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO
from workflows import LATENCY, SHORT, SNAKEMAKE, study

from common import surroundings

# modules of the standard library, of packages and of ours, which children import
NAMES = [
    *("json", "typing", "pathlib", "re", "struct", "signal", "socket", "pickle", "subprocess", "multiprocessing"),
    *("runpy", "venv", "pip", "yaml", "numpy", "torch", "tqdm", "transformers", "tokenizers", "snakemake"),
    *("common", "timing", "loading", "serving", "reporting", "engines", "sitecustomize", "usercustomize"),
]
# Snakemake's own Python, which runs before anything of ours, imports these from PYTHONPATH
SNAKEMAKES = {"sitecustomize", *NAMES[:12], "yaml", "snakemake"}
SETTINGS = {
    "PYTHONSAFEPATH": "1",
    "PYTHONOPTIMIZE": "2",
    "PYTHONUTF8": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONBREAKPOINT": "timing.stop",
    "PYTHONSTARTUP": "timing.py",
    "LC_ALL": "C",
    "VIRTUAL_ENV": "/nonexistent",
}
ODD = "a b$c'd\"é"  # a folder's name


def traps(folder: Path, names: list[str]) -> Path:
    """Modules that write a file when they are imported; the file. They end the program besides."""
    folder.mkdir(parents=True, exist_ok=True)
    caught = folder / "caught"
    for name in names:
        line = f"open({str(caught)!r}, 'a').write({name!r} + ' ' + ' '.join(__import__('sys').orig_argv) + chr(10))"
        (folder / f"{name}.py").write_text(f"{line}\nraise SystemExit('a trap')\n")
    return caught


def sites(python: Path) -> list[Path]:
    """Where an environment's packages lie."""
    return list((python.parent.parent / "lib").glob("python3*/site-packages"))


@pytest.fixture
def trapped(tmp_path: Path) -> tuple[Path, dict[str, str], Callable[[], str]]:
    """A folder to work in, an environment, and what was caught: traps in that folder, in PYTHONPATH and in the home."""
    home, paths, here = tmp_path / "home", tmp_path / "paths", tmp_path / "here"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    caught = [
        traps(home / f".local/lib/python{version}/site-packages", NAMES),
        traps(paths, [name for name in NAMES if name not in SNAKEMAKES]),
        traps(here, NAMES),
    ]
    environment = os.environ | SETTINGS | {"HOME": str(home), "PYTHONPATH": str(paths)}
    environment.pop("PYTHONNOUSERSITE", None)
    return here, environment, lambda: "".join(file.read_text() for file in caught if file.exists())


def test_a_clone_at_an_odd_path_measures_among_traps_what_it_measures_elsewhere(
    trapped: tuple[Path, dict[str, str], Callable[[], str]],
    checkout: Callable[..., Path],
    torch_python: Path,
    tools_python: Path,
    tmp_path: Path,
) -> None:
    """The packages of torch's environment come from a wrapper script that sets PYTHONPATH over another Python."""
    here, environment, caught = trapped
    clone = checkout(tmp_path / ODD)
    wrapper = here / "my python"
    base = torch_python.resolve()
    wrapper.write_text(f'#!/bin/sh\nexport PYTHONPATH={sites(torch_python)[0]}\nexec {base} "$@"\n')
    wrapper.chmod(0o755)
    (here / "config").symlink_to(clone / "config")
    study(
        here,
        "models: {small: {source: {random: " + json.dumps(str(clone / "demo/config.json")) + "}}}\n"
        "formats: [fp16]\ndevice: cpu\n" + SHORT + LATENCY,
    )
    config = here / "my study.yaml"
    config.write_text((here / "study.yaml").read_text().replace(str(torch_python), str(wrapper)))
    command = [SNAKEMAKE, "--snakefile", clone / "Snakefile", "--configfile", config.name, "--cores", "2"]
    done = subprocess.run(command, cwd=here, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + caught()
    assert caught() == ""
    found = json.loads((here / "artifacts/small/latency/fp16.json").read_text())
    assert found["versions"]["torch"] == json.loads(version_of_torch(torch_python))
    assert (here / "artifacts/report/index.html").is_file()


def version_of_torch(python: Path) -> str:
    """As JSON."""
    code = "import importlib.metadata, json; print(json.dumps(importlib.metadata.version('torch')))"
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout


def test_an_environment_is_built_among_traps(
    trapped: tuple[Path, dict[str, str], Callable[[], str]], tmp_path: Path
) -> None:
    here, environment, caught = trapped
    (tmp_path / "empty.txt").write_text("")
    command = [sys.executable, REPO / "scripts/create_env.py", tmp_path / "empty.txt", tmp_path / "env"]
    del environment["PYTHONSAFEPATH"], environment["PYTHONPATH"]  # which the workflow and make have removed
    built = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert caught() == ""
    assert (tmp_path / "env/bin/python").exists()


def test_make_starts_snakemake_among_traps(
    trapped: tuple[Path, dict[str, str], Callable[[], str]], checkout: Callable[..., Path], tmp_path: Path
) -> None:
    """And with what breaks any Python: `make report` of a study that is done but for the file that Snakemake writes."""
    _, environment, caught = trapped
    clone = checkout(tmp_path / ODD)
    everything = traps(tmp_path / "all", NAMES)
    (clone / ".venv").symlink_to(REPO / ".venv")
    environment |= {"PYTHONPATH": str(tmp_path / "all"), "PYTHONHOME": "/nonexistent", "PYTHONWARNINGS": "error"}
    environment["PYTHONINSPECT"] = "1"
    (clone / "no study.yaml").write_text("models: {}\n")
    command = ["make", "report", "--assume-old=.venv/.complete", "CONFIG=no study.yaml", "CORES=1"]
    done = subprocess.run(command, cwd=clone, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert "config error: models" in done.stderr, done.stderr
    assert done.returncode == 2
    assert caught() == "" and not everything.exists()


def test_the_same_interpreter_keeps_what_a_wrapper_told_it_and_another_is_told_nothing() -> None:
    here = {"PATH": "/bin", "PYTHONPATH": ":/packages:", "PYTHONHOME": "/home/python", "PYTHONSAFEPATH": "1"}
    module = [sys.executable, "-P", "-m", "pip"]
    assert surroundings.of_child(module, here) == here | {"PYTHONPATH": "/packages"}
    assert surroundings.of_child(["/opt/python", *module[1:]], here) == {
        "PATH": "/bin",
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
    }


def test_modules_and_programs_of_ours_find_ours_and_nothing_else_does() -> None:
    scripts = str(REPO / "scripts")
    here = {"PYTHONPATH": os.pathsep.join([scripts, "/packages"])}
    ours = surroundings.of_child([sys.executable, "-P", "-m", "timing.process", "job.json"], here)
    assert ours == {"PYTHONPATH": os.pathsep.join([scripts, "/packages"]), "PYTHONSAFEPATH": "1"}
    theirs = surroundings.of_child([sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"], here)
    assert theirs == {"PYTHONPATH": "/packages", "PYTHONSAFEPATH": "1"}
    # a program that is run by its path has its folder from Python, which PYTHONSAFEPATH would forbid
    program = surroundings.of_child([sys.executable, f"{scripts}/answer.py"], here | {"PYTHONSAFEPATH": "1"})
    assert program == {"PYTHONPATH": "/packages"}


def words(node: ast.AST) -> list[list[object]]:
    """Every list in a program that could be a command: its words, with None for what is no constant."""
    lists = [each for each in ast.walk(node) if isinstance(each, (ast.List, ast.Tuple))]
    calls = [ast.List(each.args) for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [[getattr(word, "value", None) for word in each.elts] for each in (*lists, *calls)]


OTHERS = {"build_imatrix.py"}  # llama.cpp's programs have a -m and a -c too


def test_every_module_or_line_of_code_that_a_program_runs_comes_without_the_current_folder() -> None:
    found = 0
    for file in sorted((REPO / "scripts").rglob("*.py")):
        for command in words(ast.parse(file.read_text())) if file.name not in OTHERS else []:
            for place, word in enumerate(command):
                if word in ("-m", "-c"):
                    assert place and command[place - 1] in ("-P", "-I"), f"{file}: {command}"
                    found += 1
    assert found > 10


RAW = {
    "common/program.py": "the one way",
    "serving/guard.py": "it outlives what it guards; its environment is surroundings.of_child's",
    "serving/lifecycle.py": "the same",
    "serving/supervisor.py": "it has its starter's environment",
    "create_env.py": "its environment is surroundings.of_child's",
    "compile_llama_cpp.py": "the same of pip; the others are no Python",
    "compile_exllamav3.py": "nvcc",
    "reporting/page.py": "git",
    "unpack_bundle.py": "it is copied to other machines and clears the environment itself",
}


def test_programs_are_started_by_one_function() -> None:
    raw = {
        str(file.relative_to(REPO / "scripts"))
        for file in (REPO / "scripts").rglob("*.py")
        for each in ast.walk(ast.parse(file.read_text()))
        if isinstance(each, ast.Call) and ast.unparse(each.func).startswith(("subprocess.", "os.exec", "os.system"))
        if not ast.unparse(each.func).endswith(("Expired", "CompletedProcess"))
    }
    assert raw == RAW.keys()
