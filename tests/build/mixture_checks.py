"""Build formats of a small mixture, in the environment of their tool; print what became of each, as JSON.

    python tests/build/mixture_checks.py FOLDER FAMILY FORMAT...

A calibration text never reaches one of the experts of the last layer. `FORMAT planted` is the format of a tool that
writes NaN into the scales of one expert; that number is planted again in the finished artifact, which the gate reads.
"""

import contextlib
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from quantmill.build.quantizer import program as builder  # noqa: E402
from quantmill.checkpoint import shards  # noqa: E402

work, family, *formats = sys.argv[1:]
folder = Path(work)
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 128, "pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
LATENT |= {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
FAMILIES = {
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, head_dim=32),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SHAPE | EXPERTS | LATENT, n_routed_experts=4),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SHAPE | {"layer_types": ["full_attention"] * 2, "rope_parameters": ROPE, "head_dim": 32},
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}
UNREACHED = 2
CHARACTERS = 3_000
GPTQ = {"bits": 4, "group_size": "auto", "sym": True, "desc_act": False, "damp_percent": 0.05}
AWQ = {"tool": "auto", "w_bit": 4, "q_group_size": "auto", "zero_point": True, "version": "GEMM"}
AUTOROUND = {"layout": "gptq", "bits": 4, "group_size": "auto", "sym": True, "iters": 2}
# format -> program, its parameters, the layout, and the engine of this environment that runs it
FORMATS: dict[str, tuple[str, dict[str, Any], str, str | None]] = {
    "gptq-int4": ("gptq", GPTQ, "gptq", "gptqmodel"),
    "awq-int4": ("awq", AWQ, "awq", "gptqmodel"),
    "autoround-int4": ("autoround", AUTOROUND, "gptq", None),
    "ct-w4a16": ("llmcompressor", {"scheme": "W4A16", "group_size": "auto"}, "compressed-tensors", None),
    "bnb-nf4": ("bitsandbytes", {"type": "nf4", "double_quant": False}, "bitsandbytes", None),
    "torchao-int8": ("torchao", {"type": "int8"}, "torchao", None),
    "hqq-int4": ("hqq", {"nbits": 4, "group_size": 64}, "hqq", None),
}


def program(name: str, *arguments: object) -> str:
    """Run a program of ours in this process; return the line of its error, or nothing."""
    sys.argv = ["quantmill", name, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(str(REPO / "scripts/quantmill"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            return str(end.code)
    return ""


def prepare(*arguments: object) -> None:
    """Run a program that must succeed."""
    assert not (error := program(*map(str, arguments))), error


def plant(path: Path) -> str:
    """Write NaN into the first scale of one expert, of the layer that has one without tokens; return its name."""
    file = path / "model.safetensors"
    stored = load_file(file)
    name = next(name for name in sorted(stored) if ".1.mlp.experts.3." in name and name.endswith("scale"))
    stored[name][0, 0] = torch.nan
    save_file(stored, file, metadata={"format": "pt"})
    return name


def planted(name: str) -> dict[str, Any]:
    """Return what is said of NaN in what a tool saved, and in an artifact that is there already."""
    own = builder.write_artifact

    def write_artifact(artifact: Path, task: builder.BuildTask, *more: Any) -> None:
        plant(task.saved)
        own(artifact, task, *more)

    builder.write_artifact = write_artifact
    error = made(name, folder / f"{name}-planted")["error"]
    builder.write_artifact = own
    said = plant(folder / name)
    weights = ["--artifact", folder / name, "--layout", FORMATS[name][2], "--evaluation", folder / "evaluation.json"]
    gate = program("gate.expected", folder / "fp16", folder / "planted.json", *weights, "--device", "cpu")
    return {"error": error, "named": said, "gate": gate}


def made(name: str, out: Path) -> dict[str, Any]:
    """Build a format. Return the line of its error; else dtypes of experts' tensors, counts of tokens, and what the
    gate says, if an engine here runs it."""
    tool, parameters, layout, engine = FORMATS[name]
    options = ["--parameters", json.dumps(parameters), "--layout", layout, "--device", "cpu", "--threads", "1"]
    if tool not in ("bitsandbytes", "torchao", "hqq"):
        options += ["--calibration", folder / "calibration.json", "--evaluation", folder / "evaluation.json"]
        options += ["--samples", "4", "--sequence-length", "128"]
    if engine:
        options += ["--gate-reference", folder / "expected.json", "--gate-evaluation", folder / "evaluation.json"]
        options += ["--gate-factor", "1000", "--engine", engine]
    error = program(f"build.{tool}", folder / "fp16", out, *options)
    if error:
        return {"error": error, "published": out.exists()}
    found = json.loads((out / "quantmill.json").read_text())
    stored = shards.find(out).tensors().values()
    dtypes = {f"{each.name.rpartition('.')[2]} {each.dtype}" for each in stored if ".experts." in each.name}
    return {
        "error": "",
        "experts": found.get("experts"),
        "dtypes": sorted(dtypes),
        "gate": found["gate"],
        "parameters": found["parameter_count"],
    }


torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
with torch.no_grad():
    for key, value in model.named_parameters():  # larger than transformers', so that experts matter
        value.copy_(torch.randn_like(value) * 0.08 + ("norm" in key))
    model.model.embed_tokens.weight[:, 0] = 1.0  # every token's state points one way, which one expert's router shuns
    mixture = model.model.layers[1].mlp
    router = (mixture.router if family == "gpt_oss" else mixture.gate).weight
    router[:, 0] = 0
    router[UNREACHED] = 0
    router[UNREACHED, 0] = -5.0
model.half().save_pretrained(folder / "source")
for file in (REPO / "demo").glob("token*"):
    shutil.copy(file, folder / "source")
prepare("fetch.name_tensors", folder / "source", folder / "tensors.json")
prepare(*("checkpoint.to_safetensors", folder / "source", folder / "safetensors", "--tensors", folder / "tensors.json"))
prepare("build.fp16", folder / "safetensors", folder / "fp16")
for kind in ("evaluation", "calibration"):
    (folder / f"{kind}.txt").write_text((REPO / f"config/{kind}.txt").read_text()[:CHARACTERS])
    files = (folder / "safetensors", folder / f"{kind}.txt", folder / f"{kind}.json")
    prepare("tokens.tokenize_texts", *files, "--as", {"calibration": "document"}.get(kind, kind))
if any(FORMATS[name][3] for name in formats if name in FORMATS):
    text = ["--evaluation", folder / "evaluation.json", "--device", "cpu"]
    prepare("gate.expected", folder / "safetensors", folder / "expected.json", *text)
facts = {}
for name in formats:
    kind, _, asked = name.partition(" ")
    facts[name] = planted(kind) if asked else made(kind, folder / kind)
print("\n" + json.dumps(facts))
