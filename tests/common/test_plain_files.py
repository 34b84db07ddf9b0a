"""Inputs that are no plain files: pipes, sockets, devices, folders, links in a ring, files without an end.

Each ends with one line that names the path, at once, and without much memory.
"""

import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MEMORY, REPO
from forge import safetensors_with

from quantmill.checkpoint import ctranslate2_bin, gguf_file, safetensors_file
from quantmill.common import manifest, plain_file
from quantmill.common.program import UserError
from quantmill.fetch.prebuilt_layouts import ct2, packed
from quantmill.plan import config, config_values, model_source
from quantmill.plan.config_values import ConfigError
from quantmill.report.reading import read_results
from quantmill.tokens import plain_text

TERABYTE = 10**12


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return "is a pipe, not a file"


def a_socket(path: Path) -> str:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has 108 bytes at most
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(path.name)
    os.chdir(here)
    return "is a socket, not a file"


def folder(path: Path) -> str:
    path.mkdir()
    return "is a folder, not a file"


def zeros(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "is a device, not a file"


def ring(path: Path) -> str:
    path.symlink_to(path.name)
    return "Too many levels of symbolic links"


def dangling(path: Path) -> str:
    path.symlink_to("../blobs/gone")
    return "is a dangling link"


NO_FILES = [pipe, a_socket, folder, zeros, ring, dangling]


def without(function: Callable[[Path], str], path: Path) -> str:
    """Replace a file by something else; return the error's words."""
    path.unlink(missing_ok=True)
    return f"{path}: {function(path)}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(REPO / "demo", tmp_path / "model")


@pytest.fixture
def refused(tmp_path: Path, run_program: Callable) -> Callable[..., str]:
    """Run a program that is to end at once, with one line and nothing made; return that line."""

    def run(program: str, *arguments: object) -> str:
        before = sorted(tmp_path.iterdir())
        result = run_program(program, *arguments)
        assert result.returncode == 1, result
        assert sorted(tmp_path.iterdir()) == before
        assert result.memory < MEMORY
        (line,) = result.stderr.splitlines()
        return line

    return run


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize(
    "name", ["config.json", "pytorch_model.bin.index.json", "pytorch_model-00002-of-00003.bin", "tokenizer.json"]
)
def test_a_models_file_that_is_not_plain(model: Path, refused: Callable, kind: Callable, name: str) -> None:
    said = without(kind, model / name)
    assert refused("fetch.link", model, model.parent / "out").startswith(f"error: {said}")


@pytest.mark.parametrize("kind", NO_FILES)
def test_a_readme_that_is_no_file(model: Path, refused: Callable, kind: Callable) -> None:
    said = without(kind, model / "README.md")
    assert refused("fetch.link", model, model.parent / "out").startswith(f"error: {said}")


@pytest.mark.parametrize("name", ["notes", "last.ckpt", ".git"])
def test_files_beside_a_model_may_be_anything(model: Path, run_program: Callable, name: str) -> None:
    pipe(model / name)
    result = run_program("fetch.link", model, model.parent / "out")
    assert result.returncode == 0, result.stderr


# a header that fits a sparse file of a terabyte, or tells of less: 8 MB of a tensor, and of a name
HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' + b" " * 8_000_000


def test_a_sparse_terabyte_is_refused_by_its_header(model: Path, refused: Callable) -> None:
    for path in model.glob("pytorch_model*"):
        path.unlink()
    os.truncate(safetensors_with(model / "model.safetensors", HEADER), TERABYTE)
    line = refused("fetch.link", model, model.parent / "out")
    assert f"model.safetensors: is {TERABYTE} bytes where its header claims {8 + len(HEADER) + 8}" in line


def test_a_described_terabyte_without_room_is_refused(model: Path, refused: Callable) -> None:
    for path in model.glob("pytorch_model*"):
        path.unlink()
    size = 8 * TERABYTE
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
    if shutil.disk_usage(model).free > size:
        pytest.skip("this disk has room for it")
    os.truncate(safetensors_with(model / "model.safetensors", header), 8 + len(header) + size)
    (model / "config.json").write_text("{}")  # which tells nothing that the weights could contradict
    assert "No space left on device, and nothing was written" in refused("fetch.link", model, model.parent / "o")


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00003.bin", "pytorch_model.bin.index.json", "config.json"])
def test_other_sparse_terabytes_are_refused_unread(model: Path, refused: Callable, name: str) -> None:
    os.truncate(model / name, TERABYTE)
    assert refused("fetch.link", model, model.parent / "out").startswith(f"error: {model / name}: ")


@pytest.mark.parametrize("read", [safetensors_file.read, gguf_file.read, gguf_file.read_all, ctranslate2_bin.read])
@pytest.mark.parametrize("kind", NO_FILES)
def test_readers_of_weights_open_plain_files_only(tmp_path: Path, read: Callable, kind: Callable) -> None:
    said = kind(tmp_path / "w.gguf")
    with pytest.raises(UserError, match=f"w.gguf: {said}"):
        read(tmp_path / "w.gguf")


@pytest.mark.parametrize("kind", NO_FILES)
def test_prebuilt_artifacts_that_are_no_files(tmp_path: Path, kind: Callable) -> None:
    for layout, name in ((ct2, "model.bin"), (ct2, "vocabulary.json"), (packed, "model.safetensors")):
        artifact = tmp_path / f"{layout.__name__}-{name}"
        artifact.mkdir()
        said = without(kind, artifact / name)
        with pytest.raises(UserError, match=said):
            layout.local(artifact)


def test_a_prebuilt_terabyte_is_refused_before_hashing(model: Path, refused: Callable) -> None:
    artifact = model.parent / "ct2"
    artifact.mkdir()
    for name in ("config.json", "vocabulary.json"):
        (artifact / name).write_text("{}")
    (artifact / "model.bin").write_bytes(struct.pack("<IH", 6, 2) + b"x\0" + struct.pack("<II", 1, 1))
    os.truncate(artifact / "model.bin", TERABYTE)
    (artifact / "quantmill.json").write_text('{"source": {}, "files": {"model.bin": {"sha256": "x"}}}')
    options = ["--model", model, "--layout", "ct2", "--format", "x", "--engine", "ctranslate2"]
    assert "model.bin: " in refused("fetch.prebuilt", artifact, model.parent / "out", *options)


@pytest.mark.parametrize("kind", NO_FILES)
def test_texts_configs_and_results_that_are_no_files(tmp_path: Path, kind: Callable) -> None:
    path = tmp_path / "input"
    said = f"{path}: {kind(path)}"
    with pytest.raises(ConfigError, match=f"texts.evaluation: {said}"):
        config.check_text("texts.evaluation", path)
    for read in (plain_text.read, read_results, manifest.sha256):
        with pytest.raises(UserError, match=said):
            read(path)
    with pytest.raises(ConfigError, match=said):
        config_values.check_file(path)
    assert model_source.read_config(path) == {}  # the job that reads it says so
    (tmp_path / "artifact").mkdir()
    kind(tmp_path / "artifact/quantmill.json")
    with pytest.raises(UserError, match=r"quantmill\.json: "):
        manifest.read(tmp_path / "artifact")


@pytest.mark.parametrize("kind", NO_FILES)
def test_a_task_that_is_no_file(tmp_path: Path, kind: Callable) -> None:
    said = kind(tmp_path / "task.yaml")
    with pytest.raises(ConfigError, match=rf"tasks\.include: .*task\.yaml: {said}"):
        config.check_tasks({"include": str(tmp_path), "names": [], "metrics": {}})


@pytest.mark.parametrize("kind", [pipe, zeros])
@pytest.mark.parametrize("program", ["plan.show", "deploy.serve_command"])
def test_a_study_that_is_no_file(
    tmp_path: Path, call: Callable, tools_python: Path, kind: Callable, program: str
) -> None:
    said = kind(tmp_path / "study.yaml")
    python = REPO / ".venv/bin/python"
    words = ["--snakemake-python", python, tmp_path / "study.yaml"]
    words = [tools_python, "scripts/quantmill", "plan.show", *words] if program == "plan.show" else []
    words = words or [python, "scripts/quantmill", "deploy.serve_command", "demo/fp16", tmp_path / "study.yaml"]
    result = call("timeout", "60", *words)
    assert result.stderr.splitlines() == [f"error: config: {tmp_path / 'study.yaml'}: {said}; put a file there"]


def test_sparse_texts_and_tasks_are_too_large(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.touch()
    os.truncate(path, TERABYTE)
    with pytest.raises(ConfigError, match=r"task\.yaml is larger than 64 MiB; name a part of it"):
        config.check_text("texts.evaluation", path)
    with pytest.raises(ConfigError, match=r"task\.yaml is larger than 1 MiB"):
        config.check_tasks({"include": str(tmp_path), "names": [], "metrics": {}})
    with pytest.raises(ConfigError, match="over 1 MiB"):
        config_values.check_file(path)
    with pytest.raises(UserError, match="over 32 MiB"):
        read_results(path)


@pytest.mark.parametrize("path", ["/proc/self/status", "/proc/self/maps", "/proc/self/environ"])
def test_files_with_a_wrong_size_are_refused(path: str) -> None:
    with pytest.raises(UserError, match="its size is not that of its content"):
        plain_file.read(Path(path), 10**6)


def test_a_plain_file_is_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").symlink_to("a")
    assert plain_file.read(tmp_path / "b", 5) == b"12345"
    assert plain_file.read(tmp_path / "b", 3) == b"1234"  # one more than allowed: there is more
    assert not plain_file.is_there(tmp_path / "c")
    assert not plain_file.is_there(tmp_path / "a/c")


def test_what_may_not_be_read_is_one_line() -> None:
    with tempfile.TemporaryDirectory() as folder:
        inside, locked = Path(folder, "locked/file"), Path(folder, "file")
        inside.parent.mkdir()
        for path in (inside, locked):
            path.write_text("x")
        Path(folder).chmod(0o755)
        locked.chmod(0)
        inside.parent.chmod(0)
        me = os.geteuid()
        if me == 0:  # root may read everything
            os.seteuid(65534)
        try:
            with pytest.raises(UserError, match="/file: Permission denied; make it readable"):
                plain_file.read(locked, 10)
            with pytest.raises(UserError, match="locked/file: Permission denied"):
                plain_file.read(inside, 10)
        finally:
            os.seteuid(me)
            inside.parent.chmod(0o700)
