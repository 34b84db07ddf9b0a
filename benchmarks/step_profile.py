#!/usr/bin/env python3
"""Profile a token in transformers and the libraries in it: its time, and the GPU's share of it, as a JSON list.

    python benchmarks/step_profile.py OUT artifacts/MODEL/FORMAT… [--tokens 64]

Each artifact is loaded by its engine, and `generate` of the model answers one prompt of the study. `ms` is the TPOT
without a profiler, the median of five answers. `gpu_ms` is the total time of a token's kernels by torch's profiler, and
`kernels` their number. The GPU waits for the rest of `ms`. `largest` are the longest kernels, with their share of
`gpu_ms`. `versions` and `device` are as in a row.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from quantmill.common import manifest
from quantmill.common.atomic import write_json
from quantmill.common.program import UserError, parser, run

ANSWERS, LARGEST = 5, 4
ENGINES = ("transformers", "bitsandbytes", "torchao", "hqq", "gptqmodel")


class Kernel(NamedTuple):
    """All calls of a kernel: their number and total microseconds."""

    name: str
    calls: int
    microseconds: float


def summary(whole: Iterable[Kernel], first: Iterable[Kernel], tokens: int) -> dict[str, Any]:
    """Return `gpu_ms`, `kernels` and `largest` of a token after the first.

    From the kernels of an answer of `tokens` tokens (`whole`), minus those of its first token alone.
    """
    left = {each.name: (each.calls, each.microseconds) for each in whole}
    for name, calls, microseconds in first:
        before = left.get(name, (0, 0.0))
        left[name] = (before[0] - calls, before[1] - microseconds)
    total = sum(microseconds for _, microseconds in left.values())
    ranked = sorted(left.items(), key=lambda item: -item[1][1])[:LARGEST]
    return {
        "gpu_ms": total / (tokens - 1) / 1e3,
        "kernels": sum(calls for calls, _ in left.values()) / (tokens - 1),
        "largest": [{"kernel": name, "share": took / total} for name, (_, took) in ranked] if total else [],
    }


def profile(artifact: Path, tokens: int) -> dict[str, Any]:
    """Return one artifact's figures. Raises `UserError` for another engine and without a GPU."""
    name = manifest.read(artifact)["engine"]
    if name not in ENGINES:
        raise UserError(f"{artifact}: runs in {name}; name artifacts of {', '.join(ENGINES)}")
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    from quantmill import devices, engines

    if not torch.cuda.is_available():
        raise UserError("torch finds no GPU here, and this profiles one; run it where there is one")
    threads = torch.get_num_threads()
    engine: Any = engines.load(name, artifact, "cuda", threads)
    told = json.loads((artifact.parent / "tokens/prompts.json").read_text(encoding="utf-8"))["prompts"]
    ids = torch.tensor([told[0]["ids"]], device="cuda")

    def answer(n: int) -> float:
        start = time.perf_counter()
        engine.model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def kernels(n: int) -> list[Kernel]:
        with profiler(activities=[ProfilerActivity.CUDA]) as found:
            answer(n)
        on_gpu = [each for each in found.key_averages() if each.device_type == torch.autograd.DeviceType.CUDA]
        return [Kernel(each.key, each.count, each.self_device_time_total) for each in on_gpu]

    answer(tokens)  # warms up
    times = [(answer(tokens) - answer(1)) / (tokens - 1) for _ in range(ANSWERS)]
    kernels(1)  # the profiler too
    figures = {"engine": name, "ms": 1e3 * statistics.median(times)} | summary(kernels(tokens), kernels(1), tokens)
    figures |= {"versions": engine.versions(), "device": devices.describe("cuda", threads)}
    engine.close()
    torch.cuda.empty_cache()
    return figures


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("artifacts", type=Path, nargs="+")
    arguments.add_argument("--tokens", type=int, default=64, help="of an answer, 2 or more")
    options = arguments.parse_args()
    if options.tokens < 2:
        arguments.error("--tokens: write 2 or more")
    found: list[dict[str, Any]] = []
    for artifact in options.artifacts:
        names = {"model": artifact.parent.name, "format": artifact.name}
        found.append(names | profile(artifact, options.tokens))
        write_json(options.out, found)  # each time: a machine that is lent may be taken back


if __name__ == "__main__":
    run(main)
