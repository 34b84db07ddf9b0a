"""Later writes to a user's files, and changes to an artifact by hand, never pass for what was measured."""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO

from quantmill.common import atomic, manifest
from quantmill.common.atomic import can_clone, clone_or_copy, share
from quantmill.common.program import UserError


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"another")


def copy_over(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    subprocess.run(["cp", str(other), str(path)], check=True)
    other.unlink()


def write_mapped(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[20:27] = b"another"


def cut_off(path: Path) -> None:
    os.truncate(path, 10)


WRITERS = [write_in_place, copy_over, write_mapped, cut_off]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: manifest.sha256(path) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("program", ["fetch.link", "checkpoint.to_safetensors"])
@pytest.mark.parametrize("write", WRITERS)
def test_no_later_write_to_a_source_changes_artifacts(
    tmp_path: Path, call: Callable, tools_python: Path, program: str, write: Callable
) -> None:
    model, first, out = (tmp_path / name for name in ("model", "first", "out"))
    assert call(tools_python, "scripts/quantmill", "checkpoint.to_safetensors", REPO / "demo", model).returncode == 0
    (model / manifest.NAME).unlink()
    result = call(tools_python, "scripts/quantmill", program, model, first)
    assert result.returncode == 0, result.stderr
    assert (
        call(
            tools_python, "scripts/quantmill", "checkpoint.to_safetensors", first, out, "--share", "--verify"
        ).returncode
        == 0
    )
    before = digests(first), digests(out)
    recorded = json.loads((first / manifest.NAME).read_text())["files"]
    assert {name: entry["sha256"] for name, entry in recorded.items()} == {
        name: digest for name, digest in before[0].items() if name != manifest.NAME
    }
    for path in model.iterdir():
        write(path)
    assert (digests(first), digests(out)) == before


SHARED = {  # what makes a program share bytes with its input
    "checkpoint.to_safetensors": ("--share",),
    "checkpoint.to_bin": ("--share",),
    "build.fp16": ("--parameters", '{"share": true}'),
}


def make(folder: Path, call: Callable, python: Path, *programs: str) -> None:
    """Artifacts of the demo: source, safetensors, fp16, as far as there are programs for them."""
    steps = {
        "fetch.link": (REPO / "demo", folder / "source"),
        "checkpoint.to_safetensors": (folder / "source", folder / "safetensors", "--share", "--verify"),
        "build.fp16": (folder / "safetensors", folder / "fp16", *SHARED["build.fp16"]),
        "checkpoint.to_bin": (folder / "safetensors", folder / "bin", "--share"),
    }
    for program in programs:
        result = call(python, "scripts/quantmill", program, *steps[program])
        assert result.returncode == 0, result.stderr


BUILDS = [
    ("checkpoint.to_safetensors", "source", "pytorch_model-00002-of-00003.bin"),
    ("checkpoint.to_safetensors", "source", "config.json"),
    ("build.fp16", "safetensors", "model-00002-of-00003.safetensors"),
    ("build.fp16", "safetensors", "tokenizer.json"),
    ("checkpoint.to_bin", "safetensors", "model-00001-of-00003.safetensors"),
]


@pytest.mark.parametrize(("program", "folder", "name"), BUILDS)
def test_a_build_from_a_changed_input_stops(
    tmp_path: Path, call: Callable, tools_python: Path, program: str, folder: str, name: str
) -> None:
    make(tmp_path, call, tools_python, "fetch.link", "checkpoint.to_safetensors")
    path = tmp_path / folder / name
    with path.open("r+b") as file:  # one bit, in the last byte that means something
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    result = call(tools_python, "scripts/quantmill", program, tmp_path / folder, tmp_path / "out", *SHARED[program])
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"error: {path}: has changed since quantmill.json was written; remove the folder {path.parent}, and run again"
    )
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
    path.unlink()
    result = call(tools_python, "scripts/quantmill", program, tmp_path / folder, tmp_path / "out", *SHARED[program])
    assert result.returncode == 1
    assert str(path) in result.stderr.splitlines()[-1]


def test_changed_shared_weights_stop_the_next_build(tmp_path: Path, call: Callable, tools_python: Path) -> None:
    """The check of weights that are hashed by the way, for NaN, instead of once more."""
    make(tmp_path, call, tools_python, "fetch.link", "checkpoint.to_safetensors")
    again = [tmp_path / "safetensors", tmp_path / "again", "--share", "--verify", "--finite"]
    result = call(tools_python, "scripts/quantmill", "checkpoint.to_safetensors", *again)
    assert result.returncode == 0, result.stderr
    name = "model-00001-of-00003.safetensors"
    for shared in ("safetensors", "again"):  # a hard link is one file; a reflink is not
        with (tmp_path / shared / name).open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\1")
    result = call(
        tools_python, "scripts/quantmill", "checkpoint.to_safetensors", *again[:1], tmp_path / "third", *again[2:]
    )
    assert f"{name}: has changed since quantmill.json was written" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "third").exists()


def test_only_written_files_are_hashed_before_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = tmp_path / "fp16"
    artifact.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (artifact / name).write_text("weights")
    manifest.write(artifact, format="fp16", tool="x", tool_version="1", source={})
    read = []
    monkeypatch.setattr(manifest, "_digest", lambda path: read.append(path.name) or manifest.sha256(path))
    assert manifest.read_unchanged(artifact)["format"] == "fp16"
    assert read == []
    later = (artifact / manifest.NAME).stat().st_mtime_ns + 10**9
    os.utime(artifact / "tokenizer.json", ns=(later, later))  # as after a copy to another disk
    manifest.read_unchanged(artifact)
    assert read == ["tokenizer.json"]
    for content in ("WEIGHTS", "more weights"):
        (artifact / "model.safetensors").write_text(content)
        os.utime(artifact / "model.safetensors", ns=(later, later))
        with pytest.raises(UserError, match=r"model\.safetensors: has changed since quantmill\.json was written"):
            manifest.read_unchanged(artifact)


def test_a_weight_beyond_float16_overwrites_no_shared_file(tmp_path: Path, call: Callable, tools_python: Path) -> None:
    """The files before it are shared by then, and written once more."""
    source = tmp_path / "safetensors"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"dtype": "float32", "vocab_size": 2}))
    files = {f"model-0000{number}-of-00002.safetensors": number for number in (1, 2)}
    for name, number in files.items():
        kind, data = [("F16", bytes(4)), ("F32", struct.pack("<2f", 1e6, 1))][number - 1]
        header = {f"t{number}": {"dtype": kind, "shape": [2], "data_offsets": [0, len(data)]}}
        encoded = json.dumps(header).encode()
        (source / name).write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    index = {"metadata": {}, "weight_map": {f"t{number}": name for name, number in files.items()}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    manifest.write(source, format="safetensors", tool="x", tool_version="1", source={}, parameter_count=4)
    before = digests(source)
    result = call(tools_python, "scripts/quantmill", "build.fp16", source, tmp_path / "fp16", *SHARED["build.fp16"])
    assert result.returncode == 0, result.stderr
    made = digests(tmp_path / "fp16")
    assert digests(source) == before
    first, second = files
    assert made[first] == before[first]
    assert (tmp_path / "fp16" / second).read_bytes().endswith(struct.pack("<2f", 1e6, 1))


def test_a_strangers_manifest_is_no_reason_to_share(tmp_path: Path, call: Callable, tools_python: Path) -> None:
    model = tmp_path / "model"
    assert (
        call(
            tools_python, "scripts/quantmill", "checkpoint.to_safetensors", REPO / "demo", model, "--verify"
        ).returncode
        == 0
    )
    assert call(tools_python, "scripts/quantmill", "checkpoint.to_safetensors", model, tmp_path / "out").returncode == 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert path.stat().st_nlink == 1


def test_a_copy_has_the_bytes_and_their_hash(tmp_path: Path) -> None:
    content = os.urandom(2**20 + 1)
    (tmp_path / "a").write_bytes(content)
    assert clone_or_copy(tmp_path / "a", tmp_path / "b") == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "b").read_bytes() == content
    (tmp_path / "a").write_bytes(b"")
    assert clone_or_copy(tmp_path / "a", tmp_path / "c") == hashlib.sha256(b"").hexdigest()
    with pytest.raises(FileExistsError):
        clone_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == content


def test_a_file_that_grows_during_copying_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a"
    source.write_bytes(bytes(3 * 2**20))

    class Writing:
        """A hash during whose first piece the file is written to."""

        def __init__(self) -> None:
            self.pieces = 0

        def update(self, _: object) -> None:
            self.pieces += 1
            if self.pieces == 1:
                with source.open("ab") as file:
                    file.write(b"more")

    monkeypatch.setattr(atomic.hashlib, "sha256", Writing)
    with pytest.raises(UserError, match="a: was written to while it was copied; run again"):
        clone_or_copy(source, tmp_path / "b")


def test_a_file_without_an_end_is_refused(tmp_path: Path) -> None:
    """The size that the kernel tells of is 0."""
    with pytest.raises(UserError, match="/proc/self/status: was written to while it was copied"):
        clone_or_copy(Path("/proc/self/status"), tmp_path / "b")


def test_a_file_without_room_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    size = 2**43
    if shutil.disk_usage(tmp_path).free > size:
        pytest.skip("this disk has room for it")
    os.truncate(tmp_path / "a", size)
    with pytest.raises(OSError, match="No space left") as refused:
        clone_or_copy(tmp_path / "a", tmp_path / "b")
    assert refused.value.errno == errno.ENOSPC
    assert (tmp_path / "b").stat().st_size == 0


def test_reflinks_are_used_where_they_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the kernel, which few file systems ask for it: FICLONE makes the target's bytes the source's."""
    asked = []

    def clone(target: int, request: int, source: int) -> int:
        asked.append(request)
        os.pwrite(target, os.pread(source, 2**20, 0), 0)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    (tmp_path / "a").write_bytes(b"weights")
    assert clone_or_copy(tmp_path / "a", tmp_path / "b") == hashlib.sha256(b"weights").hexdigest()
    share(tmp_path / "a", tmp_path / "c")
    assert can_clone(tmp_path)
    assert asked == [0x40049409] * 3
    for name in ("b", "c"):
        assert (tmp_path / name).read_bytes() == b"weights"
        assert not (tmp_path / name).samefile(tmp_path / "a")


@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_a_reflink_takes_no_disk(tmp_path: Path, kind: str) -> None:
    if os.geteuid() or not shutil.which(f"mkfs.{kind}"):
        pytest.skip(f"needs root and mkfs.{kind}")
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    image.touch()
    os.truncate(image, 600_000_000)
    subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=False).returncode:
        pytest.skip(f"{kind} in a file cannot be mounted here")
    try:
        assert can_clone(disk)
        (disk / "a").write_bytes(os.urandom(50_000_000))
        os.sync()
        used = shutil.disk_usage(disk).used
        digest = clone_or_copy(disk / "a", disk / "b")
        share(disk / "a", disk / "c")
        os.sync()
        assert shutil.disk_usage(disk).used - used < 1_000_000
        write_mapped(disk / "a")
        assert digest == manifest.sha256(disk / "b") == manifest.sha256(disk / "c") != manifest.sha256(disk / "a")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_artifacts_share_what_does_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no reflinks here")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    (tmp_path / "a").write_text("a")
    share(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")
    assert not can_clone(tmp_path)
    monkeypatch.setattr(os, "link", refuse)
    share(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "a"
    assert not (tmp_path / "a").samefile(tmp_path / "c")
