"""Run in envs/gptqmodel: quantize small random models of several architectures, and print what became of each as JSON.

    python tests/build/architectures_checks.py FOLDER DEMO-ARTIFACTS ARCHITECTURE...  (mistral among them)

Their tokenizer and texts are the demo's; the weights are random, biases and norms too, so that nothing that a tool
drops goes unnoticed.
"""

import contextlib
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from quantmill import engines  # noqa: E402
from quantmill.common import surroundings  # noqa: E402

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 256, "pad_token_id": 0}
ARCHITECTURES = {
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=None),
    "phi3": transformers.Phi3Config(**SHAPE),
    "gemma": transformers.GemmaConfig(**SHAPE, head_dim=32),
    "gemma3": transformers.Gemma3TextConfig(
        **SHAPE, head_dim=32, sliding_window=64, layer_types=["sliding_attention", "full_attention"]
    ),
    "olmo2": transformers.Olmo2Config(**SHAPE),
    "mamba": transformers.MambaConfig(hidden_size=128, num_hidden_layers=2, vocab_size=2048, time_step_rank=32),
}

work, demo = map(Path, sys.argv[1:3])
ids = json.loads((demo / "tokens/evaluation.json").read_text())["ids"][:128]
texts = ["--calibration", demo / "tokens/calibration.json", "--evaluation", demo / "tokens/evaluation.json"]
texts += ["--samples", "8", "--sequence-length", "128", "--parameters"]
PARAMETERS = {
    "gptq": {"bits": 4, "group_size": "auto", "sym": True, "desc_act": False, "damp_percent": 0.05},
    "awq": {"tool": "auto", "w_bit": 4, "q_group_size": "auto", "zero_point": True, "version": "GEMM"},
}


def convert(source: Path) -> Path:
    """Return the fp16 artifact of a model's source, made beside it as the workflow does."""
    for program, read, out in (
        ("checkpoint.to_safetensors", "source", "safetensors"),
        ("build.fp16", "safetensors", "fp16"),
    ):
        command = [sys.executable, REPO / "scripts/quantmill", program, source.with_name(read), source.with_name(out)]
        subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr, env=surroundings.of_child(command))
    return source.with_name("fp16")


def checkpoint(name: str) -> Path:
    """Return the fp16 artifact of a random model."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name], dtype=torch.float32)
    with torch.no_grad():
        for key, value in model.named_parameters():
            value.copy_(torch.randn_like(value) * 0.08 + ("norm" in key and "gemma" not in name))
    folder = work / name / "source"
    model.to(torch.float16).save_pretrained(folder)
    for file in (demo / "fp16").glob("token*"):
        shutil.copy(file, folder)
    return convert(folder)


def build(tool: str, *folders: object) -> str:
    """Quantize in this process, whose libraries take long to import; return the line of an error, or nothing."""
    sys.argv = ["quantmill", f"build.{tool}", *map(str, (*folders, *texts)), json.dumps(PARAMETERS[tool])]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(str(REPO / "scripts/quantmill"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            return str(end.code)
    return ""


def with_code(name: str, file: str, named: dict[str, Any]) -> Path:
    """Make the fp16 artifact of a model whose `file` names Python code, which would leave a file if it ran."""
    folder = shutil.copytree(work / "mistral/source", work / name / "source")
    (folder / "code.py").write_text(f"{name = }\nopen({str(work / 'ran')!r}, 'w').close()\n")
    config = (folder / "config.json").read_text()  # they differ only in their names; llama's has no tokenizer class
    (folder / "config.json").write_text(config.replace("mistral", "llama").replace("Mistral", "Llama"))
    fp16 = convert(folder)
    content = json.loads((fp16 / file).read_text()) | {"auto_map": named}
    content.pop("tokenizer_class", None)
    (fp16 / file).unlink()
    (fp16 / file).write_text(json.dumps(content).replace("FOLDER", str(folder)))
    record = json.loads((fp16 / "quantmill.json").read_text())
    del record["files"][file]  # as if it had been made so
    (fp16 / "quantmill.json").write_text(json.dumps(record))
    return fp16


facts: dict[str, Any] = {}
for architecture in sys.argv[3:]:
    fp16 = checkpoint(architecture)
    reference = engines.load("transformers", fp16, "cpu", 1)
    expected = np.concatenate([chunk.copy() for chunk in reference.logits(ids)])
    for tool in PARAMETERS:
        out = work / architecture / tool
        fact = facts[f"{architecture} {tool}"] = {"error": build(tool, fp16, out), "published": out.exists()}
        if out.exists():
            engine = engines.load("gptqmodel", out, "cpu", 1)
            logits = np.concatenate([chunk.copy() for chunk in engine.logits(ids)])
            cosine = (logits * expected).sum(-1) / np.linalg.norm(logits, axis=-1) / np.linalg.norm(expected, axis=-1)
            fact["tool"] = json.loads((out / "quantmill.json").read_text())["tool"]
            fact |= {"cosine": float(np.median(cosine)), "tokens": len(list(engine.decode([ids[:20]], 20)))}
            engine.close()
MODEL = {"AutoConfig": "FOLDER--code.Config", "AutoModelForCausalLM": "FOLDER--code.Model"}
CODE = {
    "model": ("config.json", MODEL),
    "tokenizer": ("tokenizer_config.json", {"AutoTokenizer": [None, "FOLDER--code.T"]}),
}
for name, (file, named) in CODE.items():
    fp16 = with_code(f"code-{name}", file, named)
    errors = [build(tool, fp16, work / f"code-{name}/{tool}") for tool in PARAMETERS]
    facts[f"code {name}"] = {"errors": errors, "ran": (work / "ran").exists()}
artifact = work / "mistral/gptq"
config = json.loads((artifact / "config.json").read_text()) | {"attribute_map": {"auto_map": "zzz"}}
folder = str(shutil.copytree(work / "code-model/source", work / "code-engine"))
config["zzz"] = {key: value.replace("FOLDER", folder) for key, value in MODEL.items()}
(artifact / "config.json").write_text(json.dumps(config))
engines.load("gptqmodel", artifact, "cpu", 1).close()
facts["code engine"] = {"errors": [], "ran": (work / "ran").exists()}
facts["cards"] = os.environ.get("CUDA_VISIBLE_DEVICES")
print("\n" + json.dumps(facts))  # below whatever bar a tool has left
