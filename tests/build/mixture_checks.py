"""Run in envs/gptqmodel: quantize a small mixture of whose experts a calibration text never reaches one; print what its
manifest says, as JSON.

    python tests/build/mixture_checks.py FOLDER
"""

import contextlib
import json
import runpy
import shutil
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import torch  # noqa: E402
import transformers  # noqa: E402

work = Path(sys.argv[1])
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 128}
UNREACHED = 2
CHARACTERS = 3_000


def program(name: str, *arguments: object) -> None:
    """Run a program of ours."""
    sys.argv = ["quantmill", name, *map(str, arguments)]
    with contextlib.redirect_stdout(sys.stderr):
        runpy.run_path(str(REPO / "scripts/quantmill"), run_name="__main__")


torch.manual_seed(0)
config = transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
with torch.no_grad():
    model.model.embed_tokens.weight[:, 0] = 1.0  # every token's state points one way, which one expert's router shuns
    router = model.model.layers[1].mlp.gate.weight
    router[:, 0] = 0
    router[UNREACHED] = 0
    router[UNREACHED, 0] = -5.0
model.half().save_pretrained(work / "source")
for file in (REPO / "demo").glob("token*"):
    shutil.copy(file, work / "source")
program("fetch.name_tensors", work / "source", work / "tensors.json")
program("checkpoint.to_safetensors", work / "source", work / "safetensors", "--tensors", work / "tensors.json")
program("build.fp16", work / "safetensors", work / "fp16")
for kind in ("evaluation", "calibration"):
    (work / f"{kind}.txt").write_text((REPO / f"config/{kind}.txt").read_text()[:CHARACTERS])
    files = (work / "safetensors", work / f"{kind}.txt", work / f"{kind}.json")
    program("tokens.tokenize_texts", *files, "--as", {"calibration": "document"}.get(kind, kind))
texts = ["--calibration", work / "calibration.json", "--evaluation", work / "evaluation.json"]
texts += ["--samples", "4", "--sequence-length", "128", "--device", "cpu"]
text = ["--evaluation", work / "evaluation.json", "--device", "cpu"]
program("gate.expected", work / "safetensors", work / "expected.json", *text)
gate = ["--gate-reference", work / "expected.json", "--gate-evaluation", work / "evaluation.json"]
gate += ["--gate-factor", "1000", "--layout", "gptq", "--engine", "gptqmodel"]
gptq = {"bits": 4, "group_size": "auto", "sym": True, "desc_act": False, "damp_percent": 0.05}
program("build.gptq", work / "fp16", work / "gptq-int4", "--parameters", json.dumps(gptq), *texts, *gate)
found = json.loads((work / "gptq-int4/quantmill.json").read_text())
facts = {"experts": found["experts"], "faithful": found["gate"]["faithful"]}
print(json.dumps(facts | {"parameters": found["parameter_count"]}))
