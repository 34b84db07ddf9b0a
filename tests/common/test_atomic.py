"""Publishing: nothing half-written under a final name, nothing of the user's lost, one writer at a time."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO

from quantmill.common import manifest
from quantmill.common.atomic import clone_or_copy, write_atomically
from quantmill.common.program import UserError


def build(final: Path, content: str = "new", **options: Path) -> None:
    with write_atomically(final, **options) as folder:
        folder.mkdir()
        (folder / "weights").write_text(content)
        manifest.write(folder, format="x", tool="x", tool_version="1", source={})


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    build(tmp_path / "out", "old")
    with pytest.raises(ZeroDivisionError), write_atomically(tmp_path / "out") as folder:
        folder.mkdir()
        raise ZeroDivisionError
    assert (tmp_path / "out/weights").read_text() == "old"
    build(tmp_path / "out")
    assert (tmp_path / "out/weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["notes.txt", ".git", ".env"])
def test_what_is_not_ours_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("precious")
    with pytest.raises(UserError, match="not an artifact of Quantmill"):
        build(tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == "precious"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(UserError, match="is a file, not a folder"):
        build(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"


def test_a_folder_with_its_source_is_not_replaced(tmp_path: Path) -> None:
    build(tmp_path / "out")
    (tmp_path / "out/src").mkdir()
    with pytest.raises(UserError, match=r"contains the input .*src"):
        build(tmp_path / "out", source=tmp_path / "out/src")
    assert (tmp_path / "out/src").is_dir()


def test_a_second_writer_is_told_so(tmp_path: Path, call: Callable, tools_python: Path) -> None:
    with write_atomically(tmp_path / "out") as folder:
        folder.mkdir()
        result = call(tools_python, "scripts/quantmill", "checkpoint.to_safetensors", REPO / "demo", tmp_path / "out")
        assert result.returncode == 1
        assert "another program is writing it" in result.stderr
        (folder / "first").write_text("first")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["first"]


def test_an_old_folder_comes_back_after_a_kill(tmp_path: Path) -> None:
    build(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.old")  # as if killed between the two renames
    with pytest.raises(ZeroDivisionError), write_atomically(tmp_path / "out"):
        raise ZeroDivisionError
    assert (tmp_path / "out/weights").read_text() == "old"


def test_what_was_half_removed_never_comes_back(tmp_path: Path) -> None:
    build(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.gone")  # as if killed while it was being removed
    (tmp_path / ".out.gone/weights").unlink()
    with pytest.raises(ZeroDivisionError), write_atomically(tmp_path / "out"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    with pytest.raises(FileExistsError), write_atomically(tmp_path / "out") as folder:
        folder.mkdir()
        clone_or_copy(tmp_path / "victim", folder / "quantmill.json")
        manifest.write(folder, format="x", tool="x", tool_version="1")
    assert (tmp_path / "victim").read_text() == "precious"


def test_hashes_are_of_bytes_not_of_a_manifest(tmp_path: Path, call: Callable, tools_python: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(REPO / "demo", model)
    (model / "quantmill.json").write_text('{"source": {}, "files": {"config.json": {"sha256": "FORGED"}}}')
    assert (
        call(
            tools_python, "scripts/quantmill", "checkpoint.to_safetensors", model, tmp_path / "out", "--verify"
        ).returncode
        == 0
    )
    files = json.loads((tmp_path / "out/quantmill.json").read_text())["files"]
    assert all(manifest.sha256(tmp_path / "out" / name) == entry["sha256"] for name, entry in files.items())
