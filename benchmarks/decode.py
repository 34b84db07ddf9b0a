#!/usr/bin/env python3
"""Measure decoding of a shape on a GPU, by `generate` and captured, and the kernels of a captured step.

    envs/gptqmodel/bin/python benchmarks/decode.py CONFIG float16|gptq|awq [--unmerged] [--backend GPTQ_TRITON]

Speed does not depend on the values of weights, so those of CONFIG (a Llama's config.json) are random words, made where
they are used: no checkpoint, no quantization. --unmerged does not merge the projections that read one input. --backend
selects another of gptqmodel's kernels. Prints tokens/s of decoding (without the first token; median and range of the
runs), whether captured tokens equal those of `generate`, and the kernels.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "scripts"))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from quantmill.engines import gptqmodel, transformers  # noqa: E402

NEW_TOKENS, PROMPT, GROUP = 200, 23, 128


class Float16(transformers.Engine):
    """Engine of float16 with weights made on the device."""

    def _load(self, artifact: Path, device: str) -> PreTrainedModel:
        self.compute_type = "float16"
        with torch.device(device):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(artifact), dtype=torch.float16)


def write_artifact(config: dict, method: str, folder: Path) -> None:
    """Write an artifact of random 4-bit weights in a method's format."""
    generator = torch.Generator().manual_seed(0)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int32)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, keys)}
    shapes |= {"self_attn.v_proj": (hidden, keys), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)}
    tensors = {"model.norm.weight": torch.ones(hidden).half()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = (torch.randn(config["vocab_size"], hidden, generator=generator) * 0.02).half()
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = torch.ones(hidden).half()
        for part, (inputs, outputs) in shapes.items():
            gptq = method == "gptq"
            parts = {
                "qweight": words(inputs // 8, outputs) if gptq else words(inputs, outputs // 8),
                "qzeros": torch.full((inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32),
                "scales": torch.rand(inputs // GROUP, outputs, generator=generator).half() * 0.004 + 0.001,
            } | ({"g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP} if gptq else {})
            tensors |= {f"{layer}.{part}.{key}": value for key, value in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": method, "bits": 4, "group_size": GROUP}
    quantization |= (
        {"sym": True, "desc_act": False, "checkpoint_format": "gptq"}
        if method == "gptq"
        else {"zero_point": True, "version": "gemm"}
    )
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    for file in (REPO / "demo").glob("token*"):  # gptqmodel wants one; ids are all that is used
        (folder / file.name).write_bytes(file.read_bytes())


def rates(engine: transformers.Engine, ids: list[int], runs: int) -> tuple[list[int], list[float]]:
    """Decode after a warm-up; return the tokens, and tokens/s after the first token of each run."""
    found = []
    for _ in range(1 + runs):
        _, tokens, times = zip(*engine.decode([ids], NEW_TOKENS), strict=True)
        found.append((NEW_TOKENS - 1) / (times[-1] - times[0]))
    return list(tokens), found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("weights", choices=["float16", "gptq", "awq"])
    parser.add_argument("--unmerged", action="store_true")
    parser.add_argument("--backend", choices=[backend.name for backend in gptqmodel.BACKEND])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    config = json.loads(options.config.read_text())
    if options.unmerged:
        gptqmodel.merge = transformers.merge = lambda *_: None
    if options.backend:
        backend = gptqmodel.BACKEND[options.backend]
        gptqmodel.KERNELS = {key: (backend, *types) for key, (_, *types) in gptqmodel.KERNELS.items()}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.weights == "float16":
            (folder / "config.json").write_text(json.dumps(config))
            engine: transformers.Engine = Float16(folder, "cuda", 1)
        else:
            write_artifact(config, options.weights, folder)
            engine = gptqmodel.Engine(folder, "cuda", 1)
    ids = torch.randint(3, config["vocab_size"], (PROMPT,)).tolist()
    print(f"{options.config.stem} {options.weights}{' unmerged' * options.unmerged}, {torch.cuda.get_device_name()}")
    print(f"{engine.weight_bytes() / 1e9:.2f} GB a token; {engine.versions()}")
    outputs = {}
    for mode in engine.modes:
        engine.mode = mode
        outputs[mode], found = rates(engine, ids, options.runs)
        print(f"{mode}: {statistics.median(found):.1f} tokens/s ({min(found):.1f} to {max(found):.1f})")
    print(f"the same tokens: {outputs['captured'] == outputs['generate']}; fused: {', '.join(engine.static.fused)}")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            engine.static.step()
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.device_time_total)
    total = sum(kernel.device_time_total for kernel in kernels) / 10
    print(f"a step: {total:.0f} us in {sum(kernel.count for kernel in kernels) / 10:.0f} kernels")
    for kernel in kernels[:12]:
        print(f"{kernel.device_time_total / 10:9.1f} us {kernel.count / 10:5.0f} x {kernel.key[:80]}")


if __name__ == "__main__":
    main()
