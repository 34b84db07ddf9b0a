"""Run in envs/gptqmodel or envs/autogptq with the demo's artifacts and names of formats: facts about GPTQ and AWQ that
test_quantization.py asserts, and about what AutoRound stores as these (test_quantizers.py).

The packed weights are unpacked here by hand, from the formats' descriptions, and run by plain transformers: what the
kernels calculate must be the same. transformers is 5 in one of the environments and 4 in the other.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from quantmill import engines  # noqa: E402
from quantmill.common import surroundings  # noqa: E402

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight outputs lies in nibble 0, 1, … of a word

artifacts = Path(sys.argv[1])


def nibbles(words: np.ndarray) -> np.ndarray:
    """[…, n] words -> […, n, 8] values of 0 to 15, the lowest bits first."""
    return (words[..., None].view(np.uint32) >> (4 * np.arange(8, dtype=np.uint32))) & 15


def gptq_weight(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Unpack to [outputs, inputs]; a word has eight inputs, and zero points are stored less one."""
    packed, zeros, scales = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
    values = nibbles(packed).transpose(0, 2, 1).reshape(-1, packed.shape[1]).astype(np.float32)
    points = nibbles(zeros).reshape(zeros.shape[0], -1).astype(np.float32) + 1
    group = tensors[f"{name}.g_idx"]
    return ((values - points[group]) * scales.astype(np.float32)[group]).T


def awq_weight(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Unpack to [outputs, inputs]; a word has eight outputs, in `AWQ_ORDER`."""
    packed, zeros, scales = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
    inverse = np.argsort(AWQ_ORDER)
    values, points = (
        nibbles(words)[..., inverse].reshape(len(words), -1).astype(np.float32) for words in (packed, zeros)
    )
    size = len(values) // len(scales)
    return ((values - points.repeat(size, 0)) * scales.astype(np.float32).repeat(size, 0)).T


FORMATS = {
    "gptq-int4": ("build.gptq", "gptqmodel", gptq_weight),
    "awq-int4": ("build.awq", "gptqmodel", awq_weight),
    "autogptq-int4": ("build.autogptq", "autogptq", gptq_weight),
    "autoround-int4": ("build.autoround", "gptqmodel", gptq_weight),
    "autoround-awq-int4": ("build.autoround", "gptqmodel", awq_weight),
}
OTHER_GPTQ = {"bits": 4, "group_size": 64, "sym": False, "desc_act": True, "damp_percent": 0.05}
THREADS = (1, 2)  # that torch may choose; the bytes are the same
ids = json.loads((artifacts / "tokens/evaluation.json").read_text())["ids"][:256]


def build(name: str, folder: Path, threads: int) -> Path:
    """Quantize the demo's fp16 to `folder`, by the other options."""
    command = [sys.executable, REPO / "scripts/quantmill", FORMATS[name][0], artifacts / "fp16", folder]
    command += ["--parameters", json.dumps(OTHER_GPTQ), "--samples", "2", "--sequence-length", "2048"]
    command += ["--calibration", artifacts / "tokens/calibration.json"]
    command += ["--evaluation", artifacts / "tokens/evaluation.json"]
    environment = surroundings.of_child(command, os.environ | {"OMP_NUM_THREADS": str(threads)})
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr, env=environment)
    return folder


def kernels(name: str, folder: Path) -> dict[str, Any]:
    """Compare the engine's logits with those of the same weights unpacked by hand."""
    _, engine_name, weight = FORMATS[name]
    stored = load_file(folder / "model.safetensors")
    layers = [key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")]
    plain = {key: value for key, value in stored.items() if key.rpartition(".")[0] not in layers}
    plain |= {f"{layer}.weight": weight(stored, layer) for layer in layers}
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).float().eval()
    wrong = model.load_state_dict({key: torch.tensor(value).float() for key, value in plain.items()}, strict=False)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    engine = engines.load(engine_name, folder, "cpu", 1)
    logits = np.concatenate([chunk.copy() for chunk in engine.logits(ids)])
    facts = {
        "layers": len(layers),
        "unexpected": wrong.unexpected_keys + wrong.missing_keys,
        "error": float(np.abs(logits - expected).max() / np.abs(expected).max()),
        "tokens": len([token for _, token, _ in engine.decode([ids[:20]], 40)]),
        "versions": engine.versions(),
        "weight_bytes": engine.weight_bytes(),
        "held_bytes": engine.footprint().weight_bytes,
        "stored_bytes": sum(value.nbytes for value in stored.values()),
    }
    engine.close()
    return facts


def one_position(name: str, folder: Path) -> dict[str, Any]:
    """Unpack the GEMV kernel's words as its source does, and compare its layers' results."""
    from quantmill.engines.decoding import gemv

    stored, weight = load_file(folder / "model.safetensors"), FORMATS[name][2]
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    model = engines.load("gptqmodel", folder, "cpu", 1).model
    kind = type(model.model.layers[0].mlp.down_proj)
    calls = []

    def kernel(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, size: int) -> Any:
        calls.append(tuple(x.shape))
        group = np.arange(x.shape[1]) // size
        numbers = nibbles(words.numpy()).reshape(len(words), -1).astype(np.float32)
        points = nibbles(zeros.numpy()).reshape(len(words), -1).astype(np.float32)
        return x.float() @ torch.tensor((numbers - points[:, group]) * scales.float().numpy()[:, group]).T

    gemv.awq.awq_gemv_forward, gemv.awq.awq_runtime_available = kernel, lambda: True
    gemv.WEIGHTS = 640 * 256  # gate, up and down have as many, and stay
    unknown = [gemv.add(model, kind, folder, config | other) for other in ({"bits": 8}, {"group_size": 32})]
    wrapped, errors = gemv.add(model, kind, folder, config), []
    layers = {path: module for path, module in model.named_modules() if isinstance(module, gemv.Gemv)}
    for path, module in layers.items():
        x = torch.randn(1, 1, module.words.shape[1] * 8).half()
        expected = x.float() @ torch.tensor(weight(stored, path)).T
        errors.append(float((module(x) - expected).abs().max()))
    module.layer = torch.nn.Flatten()
    flat = list(module(x.expand(1, 2, -1)).shape)
    size = x.shape[-1]
    numbers, zeros, scales = torch.randint(16, (size, 8)), torch.randint(16, (size // 64, 8)), torch.rand(size // 64, 8)
    words, packed_zeros, steps = gemv.layout(numbers, zeros, scales)
    expected = ((numbers - zeros.repeat_interleave(64, 0)) * scales.half().float().repeat_interleave(64, 0)).T
    error = (kernel(torch.eye(size), words, steps, packed_zeros, 64).T - expected).abs().max()
    return {
        "unknown": unknown,
        "wrapped": wrapped,
        "errors": errors,
        "calls": calls[: len(layers)],
        "flat": flat,
        "left": type(model.model.layers[0].mlp.up_proj) is kind,
        "group_64": float(error),
        "rows_64": [packed_zeros.shape[1], steps.shape[1]],
    }


def measure_spill(quantizer: Any) -> dict[str, float]:
    """Compare auto-gptq's packed layers with the packed weights, of which one output's are all positive."""
    from auto_gptq.nn_modules.qlinear import qlinear_cuda, qlinear_cuda_old

    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 32, bias=False)
    linear.requires_grad_(False).weight[2].abs_()
    quantizer.configure(4, perchannel=True, sym=False)
    quantizer.find_params(linear.weight, weight=True)
    quantized = quantizer.quantize(linear.weight)
    steps = float(((quantized - linear.weight).abs() / quantizer.scale).max())
    linear.weight.copy_(quantized)
    errors = {}
    for module in (qlinear_cuda_old, qlinear_cuda):
        layer = module.QuantLinear(4, 64, 64, 32, True, weight_dtype=torch.float32)
        layer.pack(linear, quantizer.scale, quantizer.zero.clone(), torch.zeros(64, dtype=torch.int32))
        errors[layer.QUANT_TYPE] = float((layer(torch.eye(64)).T - linear.weight).abs().max())
    return errors | {"steps": steps}


facts: dict[str, Any] = {}
for name in sys.argv[2:]:
    folder = artifacts / name
    facts[name] = kernels(name, folder) | {"gate": json.loads((folder / "quantmill.json").read_text()).get("gate")}
    if name.startswith("autoround"):  # by gptqmodel as the others of its layout
        continue
    if FORMATS[name][1] == "gptqmodel":
        facts[name]["one_position"] = one_position(name, folder)
    if name != "awq-int4":
        other = build(name, artifacts / f"{name}-other", THREADS[0])
        facts[name]["other"] = kernels(name, other)
    if name == "autogptq-int4":
        again = build(name, artifacts / f"{name}-again", THREADS[1])
        built = [json.loads((each / "quantmill.json").read_text())["files"] for each in (other, again)]
        facts[name]["same_bytes"] = built[0] == built[1]
        from auto_gptq.quantization.quantizer import Quantizer

        from quantmill.build import autogptq

        facts["spilled"] = {"theirs": measure_spill(Quantizer()), "ours": measure_spill(autogptq.Quantizer())}
print(json.dumps(facts))
