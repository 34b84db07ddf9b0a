"""MLC-LLM itself, where an interpreter of the user's has one that works."""

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
TIMEOUT = 300  # seconds for its help; it imports TVM and torch first


def why_not(python: Path) -> str | None:
    """Why an interpreter has no MLC-LLM that works, or None where it has one.

    Asked for the help of what is needed: packages of that name exist that can be imported and do nothing.
    """
    try:
        asked = [python, "-P", "-m", "mlc_llm", "convert_weight", "--help"]
        result = run_child(asked, stdout=subprocess.PIPE, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not run ({error!s:.200})"
    if result.returncode:
        return (result.stderr.strip().splitlines() or ["it fails and says nothing"])[-1][:200]
    return None if "--quantization" in result.stdout else "`mlc_llm convert_weight --help` tells of no --quantization"


def version(python: Path) -> str:
    """Its version."""
    return _run(python, "-P", "-c", VERSION).strip().splitlines()[-1]


def convert(
    python: Path, source: Checkpoint, config: SourceConfig, folder: Path, quantization: str, device: str | None
) -> None:
    """Have MLC-LLM write weights, mlc-chat-config.json and tokenizer files to a folder.

    Args:
        device: compile its own library for this device too, as `mlc_llm.so`; none: weights only.

    Raises `UserError` where one of its programs fails.
    """
    copy = folder / "source"
    copy.mkdir()
    normalised_copy(source, config, copy)
    options = ["--quantization", quantization, "--output"]
    # a GPU rounds otherwise
    _run(python, "-P", "-m", "mlc_llm", "convert_weight", copy, "--device", "cpu", *options, folder)
    _run(python, "-P", "-m", "mlc_llm", "gen_config", copy, "--conv-template", TEMPLATE, *options, folder)
    if device:
        _run(python, "-P", "-m", "mlc_llm", "compile", folder, "--device", device, *options, folder / "mlc_llm.so")
    shutil.rmtree(copy)


def normalised_copy(source: Checkpoint, config: SourceConfig, folder: Path) -> None:
    """A folder that MLC-LLM may write to (it adds an index), with the one spelling of RoPE that it reads."""
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
    """Run it with arguments; what it prints. Raises `UserError` where it fails."""
    command = [str(part) for part in (python, *arguments)]
    result = run_child(command, stdout=subprocess.PIPE)  # alive, it would write into the next run's folder
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UserError(f"`{' '.join(command[:5])}` failed: {last[:300]}; the tool builtin does without it")
    return result.stdout
