"""Files that a program is made of, and how outputs get their final names."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO

from quantmill.common import manifest
from quantmill.common.atomic import clone_or_copy, write_atomically, write_json
from quantmill.common.code_hash import closure, digest
from quantmill.common.program import UserError


def names(program: str) -> set[str]:
    package = REPO / "scripts/quantmill"
    return {
        str(path.relative_to(package)) for path in closure(package / f"{program.replace('.', '/')}.py", package.parent)
    }


def test_closure_follows_imports_through_packages() -> None:
    found = names("checkpoint.to_safetensors")
    assert {
        "checkpoint/to_safetensors.py",
        "checkpoint/torch_zip.py",
        "checkpoint/tensor.py",
        "common/atomic.py",
    } <= found
    assert not any(name.startswith(("metrics", "report", "engines")) for name in found)


def test_closure_of_an_engine_follows_its_imports() -> None:
    assert "checkpoint/ctranslate2_bin.py" in names("engines.ctranslate2")


def test_a_servers_closure_holds_its_supervisor() -> None:
    assert "servers/supervisor.py" in names("engines.vllm_serve")


def test_closure_holds_the_kernels_sources() -> None:
    assert "mlc/cuda_products.cuh" in names("mlc.compile")


def test_quality_does_not_depend_on_latency() -> None:
    assert "metrics/latency.py" not in names("quality.measure")
    assert "metrics/divergence.py" not in names("latency.measure")


def test_a_digest_does_not_depend_on_times(tmp_path: Path) -> None:
    def digest_of(**contents: str) -> str:
        for name, text in contents.items():
            (tmp_path / name).write_text(text)
        digest.cache_clear()
        return digest(*(tmp_path / name for name in contents))

    first = digest_of(a="x", b="y")
    os.utime(tmp_path / "a", (0, 0))
    assert digest_of(b="y", a="x") == first
    others = [
        digest_of(a="x"),
        digest_of(a="y", b="x"),
        digest_of(a="xy", b=""),
        digest_of(a="x", c="y"),
        digest_of(a="x", b="y "),
    ]
    assert len({first, *others}) == 6


def test_publish_clears_what_a_killed_run_left(tmp_path: Path) -> None:
    stale = tmp_path / ".folder.partial"
    stale.mkdir()
    (stale / "old").write_text("")
    with write_atomically(tmp_path / "folder") as partial:
        partial.mkdir()
    assert list((tmp_path / "folder").iterdir()) == []


def test_publish_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "x.json", {"value": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_place_gives_the_same_bytes_a_second_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("bytes")
    clone_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "bytes"


def test_manifest_hashes_files_and_divides_bits_by_weights(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"abc")
    (tmp_path / ".hidden").write_bytes(b"not ours")
    manifest.write(tmp_path, format="f", tool="t", tool_version="1", parameter_count=6, weight_files=["model.bin"])
    content = manifest.read(tmp_path)
    assert content["bits_per_weight"] == 4
    assert content["bytes"] == 3
    # the SHA-256 of "abc", FIPS 180-4 appendix
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert content["files"] == {"model.bin": {"bytes": 3, "sha256": abc}}


def test_peak_memory_is_not_that_of_the_parent(call: Callable) -> None:
    held = bytearray(600_000_000)
    held[::4096] = bytes(len(held[::4096]))  # touched, so that it is resident here
    code = "from quantmill.common import manifest; print(manifest.peak_rss_bytes())"
    peak = int(call(sys.executable, "-c", code, PYTHONPATH=str(REPO / "scripts")).stdout)
    assert 5_000_000 < peak < 200_000_000
    assert manifest.peak_rss_bytes() > 600_000_000


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a finished artifact"):
        manifest.read(tmp_path)
