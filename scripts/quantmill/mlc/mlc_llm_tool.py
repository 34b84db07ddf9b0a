"""MLC-LLM itself, of the user's interpreter."""

import json
import shutil
import subprocess
from pathlib import Path

from quantmill.checkpoint.shards import Checkpoint
from quantmill.common.atomic import share
from quantmill.common.program import UserError, run_child
from quantmill.mlc.chat_config import TEMPLATE, TOKENIZER_FILES
from quantmill.mlc.source_config import SourceConfig

VERSION = "import mlc_llm; print(mlc_llm.__version__)"
GENERATION = "generation_config.json"
TIMEOUT = 300  # seconds for its help, before which it imports TVM and torch


def why_not(python: Path) -> str | None:
    """Return why an interpreter's MLC-LLM does not work, or None if it does.

    The test is the needed command's help: packages of that name exist that can be imported and do nothing.
    """
    try:
        asked = [python, "-P", "-m", "mlc_llm", "convert_weight", "--help"]
        result = run_child(asked, stdout=subprocess.PIPE, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not run ({error!s:.200})"
    if result.returncode:
        return (result.stderr.strip().splitlines() or ["it fails without a message"])[-1][:200]
    return None if "--quantization" in result.stdout else "`mlc_llm convert_weight --help` has no --quantization"


def version(python: Path) -> str:
    """Return MLC-LLM's version."""
    return _run(python, "-P", "-c", VERSION).strip().splitlines()[-1]


def convert(
    python: Path, source: Checkpoint, config: SourceConfig, folder: Path, quantization: str, device: str | None
) -> None:
    """Have MLC-LLM write weights, mlc-chat-config.json and tokenizer files to a folder.

    Args:
        device: compile MLC-LLM's library for this device too, as `mlc_llm.so`; None: weights only.

    Raises `UserError` if one of its programs fails.
    """
    copy = folder / "source"
    copy.mkdir()
    normalised_copy(source, config, copy)
    options = ["--quantization", quantization, "--output"]
    # a GPU rounds differently
    _run(python, "-P", "-m", "mlc_llm", "convert_weight", copy, "--device", "cpu", *options, folder)
    _run(python, "-P", "-m", "mlc_llm", "gen_config", copy, "--conv-template", TEMPLATE, *options, folder)
    if device:
        _run(python, "-P", "-m", "mlc_llm", "compile", folder, "--device", device, *options, folder / "mlc_llm.so")
    shutil.rmtree(copy)


def normalised_copy(source: Checkpoint, config: SourceConfig, folder: Path) -> None:
    """Copy a model to a folder that MLC-LLM may write to (it adds an index), with the RoPE spelling that it reads."""
    for path in source.files:
        share(path, folder / path.name)
    index = source.index()
    for path in (*([index] if index else []), *(source.folder / name for name in (*TOKENIZER_FILES, GENERATION))):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    content = {key: value for key, value in source.config().items() if key != "rope_parameters"}
    content |= {"rope_theta": config.rope_theta, "rope_scaling": config.rope_scaling}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _run(python: Path, *arguments: object) -> str:
    """Run a command and return its output. Raises `UserError` if it fails."""
    command = [str(part) for part in (python, *arguments)]
    result = run_child(command, stdout=subprocess.PIPE)  # if it outlived us, it would write into the next run's folder
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"`{' '.join(command[:5])}` failed: {last[:300]}; the tool builtin does not need it")
    return result.stdout
