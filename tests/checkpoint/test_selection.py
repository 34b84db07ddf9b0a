"""The files of a folder or a repository that make a model; others are not copied, counted or uploaded."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPO

from quantmill.checkpoint import selection, shards
from quantmill.checkpoint.selection import select
from quantmill.common import manifest
from quantmill.common.program import UserError

JUNK = {
    *("last.ckpt", "backup.zip", "optimizer.pt", "training_args.bin", "consolidated.00.pth", "notes.txt", ".gitignore"),
    *("token.json", ".env", "service-account.json", "results.json", "something.txt", "draft.safetensors"),
    *("tokenizer_config.json.bak", "modeling_own.py", "vocab.json~", "license.key", "readme.zip", "rng_state.pth"),
    *("tf_model.h5", "tokenizer.json.swp", "credentials.txt", "events.out.tfevents.1", "quantize_config.json"),
}
KEPT = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "qwen.tiktoken", "chat_template.jinja"),
    *("LICENSE", "LICENSE.txt", "LICENCE-2.0.md", "MODEL_LICENSE", "NOTICE", "Notice.txt", "USE_POLICY.md"),
    *("README.md", "README_zh.md"),
}
# what publishing takes of an artifact, and what it leaves out, as JSON
CONTENTS = """
import json, sys
from pathlib import Path
from quantmill.publish import contents
found = contents.read("m", Path(sys.argv[1]))
print(json.dumps([sorted(found.files), found.left_out]))
"""


@dataclass
class File:
    """Of a file of the hub, what is looked at here."""

    size: int


def with_junk(folder: Path) -> Path:
    """Copy the demo's checkpoint to a folder like one that it was trained in."""
    shutil.copytree(REPO / "demo", folder)
    for name in JUNK:
        (folder / name).write_bytes(b"x" * 1000)
    for name in (".git", "checkpoint-500"):
        (folder / name).mkdir()
        (folder / name / "config").write_text("x")
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_only_a_models_files_reach_the_artifacts(tmp_path: Path, run_program: Callable) -> None:
    model = with_junk(tmp_path / "model")
    source, canonical, fp16 = (tmp_path / name for name in ("source", "safetensors", "fp16"))
    result = run_program("fetch.link", model, source)
    assert result.returncode == 0, result.stderr
    assert names(source) == {*names(REPO / "demo"), manifest.NAME}
    said = json.loads((source / manifest.NAME).read_text())
    assert said["bytes"] == sum(path.stat().st_size for path in (REPO / "demo").iterdir())
    left_out = sorted([*JUNK, ".git/", "checkpoint-500/"])
    assert said["parameters"]["left_out"] == left_out[:20]
    assert [line for line in result.stderr.splitlines() if "left out" in line] == [
        f"{model}: not part of the model, so left out: {', '.join(left_out[:20])} and {len(left_out) - 20} more"
    ]
    assert "left_out" not in json.dumps(said["source"])  # which every artifact's manifest repeats
    for name in JUNK:  # as in a folder that was made before
        shutil.copy(model / name, source / name)
    result = run_program("checkpoint.to_safetensors", source, canonical, "--share")
    assert result.returncode == 0, result.stderr
    assert not names(canonical) & JUNK
    shutil.copy(model / "token.json", canonical / "token.json")
    result = run_program("build.fp16", canonical, fp16, "--parameters", '{"share": true}')
    assert result.returncode == 0, result.stderr
    assert not names(fp16) & JUNK
    for folder in (canonical, fp16):
        assert not set(json.loads((folder / manifest.NAME).read_text())["files"]) & JUNK


def test_a_folder_and_a_repository_select_the_same_files(tmp_path: Path) -> None:
    model = with_junk(tmp_path / "model")
    for name in KEPT - names(model):
        (model / name).write_text("{}")
    found = shards.find(model)
    local = {path.name for path in [*found.files, found.index(), *found.others()]}
    assert set(select("acme/m", names(model))) == local
    assert {path.name for path in selection.carried(model)} == KEPT
    assert {path.name for path in selection.parts(model)} == local | {"training_args.bin", "draft.safetensors"}


def test_a_tokenizer_of_ten_gigabytes_is_refused(tmp_path: Path, run_program: Callable) -> None:
    model = tmp_path / "model"
    shutil.copytree(REPO / "demo", model)
    os.truncate(model / "tokenizer.json", 10**10)
    result = run_program("fetch.link", model, tmp_path / "out")
    said = "tokenizer.json: is 10.0 GB, and such a file has 64 MiB at most; remove it"
    assert result.stderr.splitlines() == [f"error: {model}/{said}"]
    files = {"config.json": File(1), "model.safetensors": File(10**12)}
    assert select("acme/m", files) == ["model.safetensors", "config.json"]
    with pytest.raises(UserError, match=f"acme/m/{said}"):
        select("acme/m", files | {"tokenizer.json": File(10**10)})


def test_only_an_artifacts_files_are_uploaded(tmp_path: Path, call: Callable, tools_python: Path) -> None:
    artifact = tmp_path / "gptq-int4"
    artifact.mkdir()
    wanted = {"config.json", "tokenizer.json", "model.safetensors", "quantize_config.json", "LICENSE"}
    for name in {*JUNK, *wanted, "README.md", "mlc_llm.so", "optimizer.bin"}:
        (artifact / name).write_text("{}")
    manifest.write(artifact, format="gptq-int4", tool="x", tool_version="1", source={})
    result = call(tools_python, "-c", CONTENTS, artifact, PYTHONPATH=str(REPO / "scripts"))
    taken, left_out = json.loads(result.stdout)
    assert set(taken) == wanted
    hidden = {".gitignore", ".env"}  # which no manifest names
    assert set(left_out) == {*JUNK, "mlc_llm.so", "optimizer.bin"} - {*wanted, *hidden}
