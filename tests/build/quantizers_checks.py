"""Run in envs/quantizers with the demo's artifacts and a folder: facts that test_quantizers.py asserts, as JSON.

Each format is built twice. Its numbers are unpacked here by hand, with torch and from the formats' descriptions, and
run by plain transformers, whose linear layers round what they are given where the format's do: what the engine
calculates must be the same.
"""

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import torch  # noqa: E402
from hqq.core.utils import decode_safetensor_type  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from quantmill import engines  # noqa: E402
from quantmill.common.program import run  # noqa: E402

artifacts, work = map(Path, sys.argv[1:3])
ids = json.loads((artifacts / "tokens/evaluation.json").read_text())["ids"][:256]
Stored = dict[str, torch.Tensor]
# arXiv:2305.14314, appendix E; and four bits as bitsandbytes' kernels have them: sign, two of exponent, one of mantissa
NF4 = [-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1]
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3]
FP4 = [value / 12 for value in FP4 + [-each for each in FP4]]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # OCP Microscaling, 5.3.3


def four_bits(stored: Stored, name: str, table: list[float]) -> torch.Tensor:
    """Unpack bitsandbytes' four bits: the upper half of a byte first, blocks of 64 of a whole matrix."""
    halves = stored[f"{name}.weight"].flatten()
    values = torch.tensor(table)[torch.stack([halves >> 4, halves & 15], -1).flatten().long()]
    peaks = stored[f"{name}.weight.absmax"].flatten()
    if f"{name}.weight.nested_absmax" in stored:
        (state,) = (value for key, value in stored.items() if key.startswith(f"{name}.weight.quant_state."))
        offset = json.loads(bytes(state.tolist()))["nested_offset"]
        outer = stored[f"{name}.weight.nested_absmax"].repeat_interleave(256)[: len(peaks)]
        peaks = stored[f"{name}.weight.nested_quant_map"][peaks.long()] * outer + offset
    return values * peaks.repeat_interleave(64)


def rows(stored: Stored, name: str, numbers: str, scales: str, factor: float = 1) -> torch.Tensor:
    """Whole numbers or float8, and a scale for each row."""
    return stored[f"{name}.{numbers}"].float() * (stored[f"{name}.{scales}"].float() * factor).reshape(-1, 1)


def packed_int4(stored: Stored, name: str) -> torch.Tensor:
    words = stored[f"{name}.weight_packed"]
    numbers = torch.stack([(words >> (4 * place)) & 15 for place in range(8)], -1).flatten(1) - 8
    scales = stored[f"{name}.weight_scale"].float()
    return numbers * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)


def packed_fp4(stored: Stored, name: str) -> torch.Tensor:
    halves = stored[f"{name}.weight_packed"].long()
    values, scales = E2M1[torch.stack([halves & 15, halves >> 4], -1).flatten(1)], stored[f"{name}.weight_scale"]
    if f"{name}.weight_global_scale" in stored:
        scales = scales.float() / stored[f"{name}.weight_global_scale"]
    else:  # an exponent, 127 for 1
        scales = 2.0 ** (scales.float() - 127)
    return values * scales.repeat_interleave(values.shape[1] // scales.shape[1], 1)


def hqq(stored: Stored, name: str) -> torch.Tensor:
    halves = stored[f"{name}.W_q"]
    groups = torch.cat([halves >> 4, halves & 15]).float()
    return (groups - stored[f"{name}.zero"].float()) * stored[f"{name}.scale"].float()


def int8_rows(stored: Stored, name: str, x: torch.Tensor) -> torch.Tensor:
    step = x.abs().amax(-1, keepdim=True) / 127.5  # compressed-tensors': half of what 255 steps span
    return (x / step).round().clamp(-128, 127) * step


def int8_but_outliers(stored: Stored, name: str, x: torch.Tensor) -> torch.Tensor:
    half = x.half()
    large = half.abs() >= 6
    whole = large.any(0, keepdim=True).any(1, keepdim=True)
    peaks = half.masked_fill(large, 0).abs().amax(-1, keepdim=True).float()
    product = 6.200124e-05 * 127  # bitsandbytes' 1 / 127 / 127, which is 6.200012e-05, and the weights' scale has one
    return torch.where(whole, x, (half * (127 / peaks)).round() * peaks * product)


def fp8_rows(stored: Stored, name: str, x: torch.Tensor) -> torch.Tensor:
    step = x.abs().amax(-1, keepdim=True) / 448
    return (x / step).to(torch.float8_e4m3fn).float() * step


def fp4_groups(stored: Stored, name: str, x: torch.Tensor) -> torch.Tensor:
    whole = stored.get(f"{name}.input_global_scale")
    groups = x.unflatten(-1, (-1, 32 if whole is None else 16))
    peaks = groups.abs().amax(-1, keepdim=True)
    if whole is None:  # 1.75 and more of a power of two count as the next one
        steps = 2.0 ** ((peaks.float() * 8 / 7).log2().floor() - 2)
    else:
        steps = (peaks / 6 * whole).to(torch.float8_e4m3fn).float() / whole
    steps = steps.clamp(min=1e-30)
    odd = torch.arange(16) % 2 * 1e-6  # halves go to the even one
    nearest = ((groups.float()[..., None] / steps[..., None] - E2M1).abs() + odd).argmin(-1)
    return (E2M1[nearest] * steps).flatten(-2).to(x.dtype)


Unpack = Callable[[Stored, str], torch.Tensor]
Parameters = dict[str, Any]
# format -> its parameters, how a layer's weights are unpacked, and how its input is rounded
FORMATS: dict[str, tuple[Parameters, Unpack, Any]] = {
    "bnb-nf4": ({"type": "nf4", "double_quant": False}, lambda s, n: four_bits(s, n, NF4), None),
    "bnb-nf4-dq": ({"type": "nf4", "double_quant": True}, lambda s, n: four_bits(s, n, NF4), None),
    "bnb-fp4": ({"type": "fp4", "double_quant": False}, lambda s, n: four_bits(s, n, FP4), None),
    "bnb-int8": (
        {"type": "int8", "double_quant": False},
        lambda s, n: rows(s, n, "weight", "SCB", 1 / 127),
        int8_but_outliers,
    ),
    "torchao-int8": ({"type": "int8"}, lambda s, n: rows(s, n, "_weight_qdata", "_weight_scale"), None),
    "torchao-fp8": ({"type": "fp8"}, lambda s, n: rows(s, n, "_weight_qdata", "_weight_scale"), None),
    "hqq-int4": ({"nbits": 4, "group_size": 64}, hqq, None),
    "ct-w4a16": ({"scheme": "W4A16", "group_size": "auto"}, packed_int4, None),
    "ct-w8a8": ({"scheme": "W8A8"}, lambda s, n: rows(s, n, "weight", "weight_scale"), int8_rows),
    "ct-fp8": ({"scheme": "FP8_DYNAMIC"}, lambda s, n: rows(s, n, "weight", "weight_scale"), fp8_rows),
    "ct-nvfp4a16": ({"scheme": "NVFP4A16", "group_size": 16}, packed_fp4, None),
    "ct-nvfp4": ({"scheme": "NVFP4", "group_size": 16}, packed_fp4, fp4_groups),
    "ct-mxfp4": ({"scheme": "MXFP4", "group_size": 32}, packed_fp4, fp4_groups),
}
ENGINES = {"bnb": "bitsandbytes", "torchao": "torchao", "hqq": "hqq", "ct": "compressed-tensors"}
PROGRAMS = ENGINES | {"ct": "llmcompressor", "autoround": "autoround"}


def build(format: str, parameters: Parameters, folder: Path) -> Path:
    """Build a format from the demo's fp16, in this process, whose libraries are imported once."""
    kind = format.partition("-")[0]
    program = PROGRAMS[kind]
    sys.argv = [f"quantmill build.{program}", str(artifacts / "fp16"), str(folder), "--device=cpu", "--threads=1"]
    sys.argv += [f"--parameters={json.dumps(parameters)}", f"--format={format}"]
    sys.argv += [f"--engine={ENGINES[kind]}"] if kind in ENGINES else []
    if program in ("llmcompressor", "autoround"):
        sys.argv += [f"--{text}={artifacts}/tokens/{text}.json" for text in ("calibration", "evaluation")]
        sys.argv += ["--samples=2", "--sequence-length=128"]
    with contextlib.redirect_stdout(io.StringIO()):
        run(importlib.import_module(f"quantmill.build.{program}").main)
    return folder


def by_hand(stored: Stored, unpack: Unpack, rounded: Any, dtype: torch.dtype) -> torch.Tensor:
    """Logits of transformers' model with the weights of an artifact."""
    model = AutoModelForCausalLM.from_pretrained(artifacts / "fp16", dtype=dtype).eval()
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.data = unpack(stored, name).reshape(layer.weight.shape).to(dtype)
            if rounded:
                layer.register_forward_pre_hook(
                    lambda _, inputs, name=name: (rounded(stored, name, inputs[0]), *inputs[1:])
                )
        elif hasattr(layer, "weight"):
            assert torch.equal(layer.weight.data, stored[f"{name}.weight"].to(dtype)), name
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def layer_error(model: torch.nn.Module, stored: Stored, unpack: Unpack, rounded: Any) -> float:
    """Compare layers' outputs with products of their inputs by hand. Return the largest difference of any layer,
    over that layer's largest output. Whole models that round on their way drift apart by their last bits."""
    errors = []

    def compare(name: str) -> Callable[..., None]:
        def hook(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x = rounded(stored, name, inputs[0]) if rounded else inputs[0]
            expected = x.float() @ unpack(stored, name).reshape(output.shape[-1], -1).T
            errors.append(float((expected - output).abs().max() / output.abs().max()))

        return hook

    places = [name for name, _ in model.named_modules() if name.endswith("_proj")]
    hooks = [model.get_submodule(name).register_forward_hook(compare(name)) for name in places]
    with torch.inference_mode():
        model(torch.tensor([ids]))
    for each in hooks:
        each.remove()
    assert len(errors) == 7 * 7
    return max(errors)


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def planted() -> dict[str, Any]:
    """Load an artifact of HQQ whose file has a command where the library evaluates a dtype."""
    folder, mark = work / "hqq-int4", work / "planted"
    stored = load_file(folder / "model.safetensors")
    command = f"__import__('os').mkdir({str(mark)!r})"
    for name in [*stored]:
        if name.endswith((".compute_dtype", ".unpack_view_dtype")):
            stored[name] = torch.tensor(list(command.encode()), dtype=torch.uint8)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    engine = engines.load("hqq", folder, "cpu", 1)
    tokens, before = len(list(engine.decode([ids[:20]], 2))), mark.exists()
    name = next(name for name in stored if name.endswith(".compute_dtype"))
    decode_safetensor_type(stored[name], torch.dtype)  # as the library would have
    return {"tokens": tokens, "ran": before, "would_have": mark.exists()}


def build_twice(name: str, parameters: Parameters) -> tuple[Path, list[str]]:
    """Return a format's artifact, and the files that differ when it is built again."""
    folder, again = build(name, parameters, work / name), build(name, parameters, work / f"{name}-again")
    return folder, sorted(
        file.name for file in folder.iterdir() if file.read_bytes() != (again / file.name).read_bytes()
    )


def torchao_on_a_gpu(name: str) -> dict[str, Any]:
    """Return torchao's dtype on a GPU, and the share of finite logits in that and in float16, for layers' inputs as
    large as a real model's, 200 times the demo's."""
    engine_class, finite = engines.module("torchao").Engine, {}
    dtype = str(engine_class.default_dtype(object.__new__(engine_class), work / name, "cuda")).removeprefix("torch.")
    for each in {dtype, "float16"}:
        engine = engines.load("torchao", work / name, "cpu", 1, dtype=each)
        for layer in engine.layers:
            layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 200, *inputs[1:]))
            layer.register_forward_hook(lambda _, inputs, output: output / 200)
        logits = torch.cat([torch.tensor(chunk) for chunk in engine.logits(ids[:64])])
        finite[each] = float(logits.isfinite().float().mean())
        engine.close()
    return {"dtype": dtype, "finite": finite}


AUTOROUND = {"bits": 4, "group_size": "auto", "sym": True, "iters": 3}
# their engine, gptqmodel, lives in another environment: tests/build/quantization_checks.py
facts: dict[str, Any] = {
    name: {"others": build_twice(name, AUTOROUND | {"layout": layout})[1]}
    for name, layout in (("autoround-int4", "gptq"), ("autoround-awq-int4", "awq"))
}
for name, (parameters, unpack, rounded) in FORMATS.items():
    folder, others = build_twice(name, parameters)
    stored = load_file(folder / "model.safetensors")
    engine = engines.load(ENGINES[name.partition("-")[0]], folder, "cpu", 1)
    logits = torch.cat([torch.tensor(chunk) for chunk in engine.logits(ids)])
    expected = by_hand(stored, unpack, rounded, engine.dtype)
    facts[name] = {
        "others": others,
        "divergence": divergence(expected, logits),
        "rounding": divergence(by_hand(stored, unpack, None, engine.dtype), expected) if rounded else 0,
        "layer_error": layer_error(engine.model, stored, unpack, rounded),
        "compute_type": engine.compute_type,
        "tokens": len([token for _, token, _ in engine.decode([ids[:20]], 10)]),
        "versions": engine.versions(),
        "weight_bytes": engine.weight_bytes(),
        "held_bytes": engine.footprint().weight_bytes,
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in stored.values()}),
        "manifest": json.loads((folder / "quantmill.json").read_text()),
    }
    engine.close()
gpu = {name: torchao_on_a_gpu(name) for name in ("torchao-int8", "torchao-fp8")}
print(json.dumps(facts | {"planted": planted(), "torchao on a GPU": gpu}))
