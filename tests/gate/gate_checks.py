"""Run in envs/torch: the gate on artifacts that are right, wrong and poor; prints what it said of each as JSON.

    python tests/gate/gate_checks.py FOLDER

The model is the demo. All programs run in this process, whose libraries take long to import.
"""

import contextlib
import importlib
import io
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

from quantmill import engines  # noqa: E402

os.environ[engines.EXACT] = "1"  # as gate.check says, which in this process is too late for the library
importlib.import_module("quantmill.engines.ctranslate2")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from ctranslate2.converters import TransformersConverter  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

work = Path(sys.argv[1])
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 128, "rope_theta": 10000.0}
CHARACTERS = 14_000


def program(name: str, *arguments: object) -> str:
    """Run a program of ours; its error, if any."""
    sys.argv = ["quantmill", name, *map(str, arguments)]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(str(REPO / "scripts/quantmill"), run_name="__main__")
        except SystemExit as end:
            return str(end.code or "")
    return ""


def check_call(name: str, *arguments: object) -> None:
    error = program(name, *arguments)
    if error:
        raise SystemExit(f"{name}: {error}")


def prepare(folder: Path, model: Path = REPO / "demo", **changes: Any) -> list[object]:
    """Return a model's folders up to what is expected of it, its config changed; the gate's options."""
    shutil.copytree(model, folder / "demo")
    config = json.loads((folder / "demo/config.json").read_text())
    for key in ("rope_scaling", "rope_theta", "rope_parameters") if changes else ():
        config.pop(key)
    (folder / "demo/config.json").write_text(json.dumps(config | changes))
    (folder / "text.txt").write_text((REPO / "config/evaluation.txt").read_text()[:CHARACTERS])
    check_call("fetch.link", folder / "demo", folder / "source")
    if not (folder / "safetensors").exists():
        check_call("checkpoint.to_safetensors", folder / "source", folder / "safetensors")
    evaluation = folder / "evaluation.json"
    check_call("tokens.tokenize_texts", folder / "safetensors", folder / "text.txt", evaluation, "--as", "evaluation")
    text = ["--evaluation", evaluation, "--device", "cpu"]
    check_call("gate.expected", folder / "source", folder / "expected.json", *text)
    return ["--reference", folder / "expected.json", *text]


def gate(folder: Path, artifact: str, engine: str, options: list[object], *more: object) -> dict[str, Any]:
    """Run gate.check on an artifact."""
    out = folder / f"{artifact}.gate.json"
    out.unlink(missing_ok=True)
    error = program("gate.check", folder / artifact, out, "--engine", engine, *options, *more)
    return {"error": error, "found": json.loads(out.read_text()) if out.exists() else None}


def change_weights(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Return the canonical weights of a model, the matrices of its layers changed, and what is expected of these."""
    shutil.copytree(folder / "safetensors", folder / name)
    for file in (folder / name).glob("*.safetensors"):
        tensors = load_file(file)
        file.unlink()
        layers = {key: change(value) for key, value in tensors.items() if "layers" in key and value.ndim == 2}
        save_file(tensors | layers, file, metadata={"format": "pt"})
    weights = ["--artifact", folder / name, "--layout", "hf"]
    text = ["--evaluation", folder / "evaluation.json", "--device", "cpu"]
    check_call("gate.expected", folder / "safetensors", folder / f"{name}.json", *weights, *text)


facts: dict[str, Any] = {}
plain, scaled = work / "plain", work / "scaled"
options = prepare(plain)
check_call("build.fp16", plain / "safetensors", plain / "fp16")
facts["fp16"] = gate(plain, "fp16", "transformers", options)

config = json.loads((plain / "fp16/config.json").read_text())
shutil.copytree(plain / "fp16", plain / "other")
(plain / "other/config.json").unlink()
(plain / "other/config.json").write_text(json.dumps(config | {"rope_theta": 9000.0, "rope_parameters": None}))
facts["another config"] = gate(plain, "other", "transformers", options)

torch.manual_seed(0)
change_weights(plain, "poor", lambda value: value + 0.03 * torch.randn(value.shape).half())
poor = ["--expected", plain / "poor.json"]
facts["poor"] = gate(plain, "poor", "transformers", options, *poor)
facts["poor against the source"] = gate(plain, "poor", "transformers", options)
facts["poor for a strict study"] = gate(plain, "poor", "transformers", options, *poor, "--factor", "1.2")
facts["unread"] = gate(plain, "poor", "transformers", options, "--unchecked", "for a reason")
change_weights(plain, "garbage", torch.zeros_like)
facts["garbage"] = gate(plain, "garbage", "transformers", options, "--expected", plain / "garbage.json")
facts["another protocol"] = gate(plain, "fp16", "transformers", options, "--protocol", "llamacpp-512")

options = prepare(scaled, rope_parameters=LLAMA3)
TransformersConverter(str(scaled / "safetensors")).convert(str(scaled / "theirs"), quantization="float32")
facts["CTranslate2's converter"] = gate(scaled, "theirs", "ctranslate2", options)
check_call("build.ct2", scaled / "safetensors", scaled / "ours", "--parameters", '{"quantization": "float32"}')
facts["our use of it"] = gate(scaled, "ours", "ctranslate2", options)
check_call("build.ct2", scaled / "safetensors", scaled / "int8", "--parameters", '{"quantization": "int8"}')
text = ["--evaluation", scaled / "evaluation.json", "--device", "cpu"]
int8 = ["--artifact", scaled / "int8", "--layout", "ct2"]
check_call("gate.expected", scaled / "safetensors", scaled / "int8.json", *int8, *text)
facts["int8"] = gate(scaled, "int8", "ctranslate2", options, "--expected", scaled / "int8.json")
TransformersConverter(str(scaled / "safetensors")).convert(str(scaled / "their-int8"), quantization="int8")
facts["their int8"] = gate(scaled, "their-int8", "ctranslate2", options, "--expected", scaled / "int8.json")
large = work / "large"
shutil.copytree(plain / "safetensors", large / "safetensors")
for file in (large / "safetensors").glob("*.safetensors"):
    tensors = {key: value.bfloat16() for key, value in load_file(file).items()}
    for key, value in tensors.items():  # a unit whose weights are large, and of which nothing is taken
        if "layers.0.mlp.up_proj" in key:
            value[0] = 1e5
        if "layers.0.mlp.down_proj" in key:
            value[:, 0] = 0
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
options = prepare(large, large / "safetensors")
check_call("build.fp16", large / "safetensors", large / "fp16")
facts["large"] = gate(large, "fp16", "transformers", options)
facts["large"]["kept"] = json.loads((large / "fp16/quantmill.json").read_text())["parameters"]
cast = engines.load("transformers", large / "fp16", "cpu", 1, dtype="float16")
facts["large"]["in float16"] = [
    cast.compute_type,
    bool(np.isfinite(np.concatenate([chunk.copy() for chunk in cast.logits([5, 6, 7])])).all()),
]
facts["left"] = sorted(
    path.name for folder in (plain, scaled, large) for path in folder.iterdir() if path.name[0] == "."
)
print(json.dumps(facts))
