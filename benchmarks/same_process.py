#!/usr/bin/env python3
"""Why a row and its library used by hand differ: their ways to decode, in turn in one process, as JSON.

    envs/gptqmodel/bin/python benchmarks/same_process.py OUT artifacts/MODEL/gptq-int4
    envs/quantizers/bin/python benchmarks/same_process.py OUT artifacts/MODEL/bnb-int8
    envs/vllm/bin/python benchmarks/same_process.py OUT artifacts/MODEL/awq-int4 --vllm cuda

Of GPTQ: as gptqmodel loads it by itself, as the row does, and with the row's kernel in bfloat16. Of bitsandbytes: with
its warnings and without. Both on a CPU. Of vLLM: one call that returns the answer (by hand) and one step at a time (the
row), each with the ends of an answer ignored, or forbidden until it is long enough (the row). Each way decodes three
prompts of the study, 64 tokens, in so many rounds after one that warms up. A time is that of a token after the first,
in ms: an answer less its first token alone, or of the row's steps, from first to last. `speed` is a way's beside the
first one's: the median of the rounds, each by the medians of its prompts, and its 95% interval by bootstrap.
"""

import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import numpy as np

from checkpoint import shards
from common.program import UserError, parser, run
from common.publish import publish_json
from metrics import bootstrap

THREADS, PROMPTS, TOKENS = 2, 3, 64

Ways = dict[str, Callable[[list[int]], float]]  # seconds for each token after the first that follows a prompt


def by_gptqmodel(artifact: Path) -> Ways:
    os.environ |= {"GPTQMODEL_CPU_WORKERS": str(THREADS), "GPTQMODEL_OFFLINE": "1"}  # as rows have it; read at import
    import torch
    from gptqmodel import BACKEND, GPTQModel

    torch.set_num_threads(THREADS)
    fused = {"backend": BACKEND.GPTQ_TORCH_FUSED}
    told: dict[str, dict[str, Any]] = {"by_hand": {}, "row": fused | {"dtype": torch.float32}}
    told["row_in_bfloat16"] = fused | {"dtype": torch.bfloat16}
    return {name: generate(GPTQModel.load(str(artifact), device="cpu", **each)) for name, each in told.items()}


def by_bitsandbytes(artifact: Path) -> Ways:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)
    log = logging.getLogger("bitsandbytes")
    return {
        "with_warnings": generate(model, lambda: log.setLevel(logging.WARNING)),
        "without_warnings": generate(model, lambda: log.setLevel(logging.ERROR)),
    }


METHODS = {"gptq": by_gptqmodel, "bitsandbytes": by_bitsandbytes}


def generate(model: Any, prepare: Callable[[], None] = lambda: None) -> Callable[[list[int]], float]:
    """Of transformers and of what has its `generate`; `prepare` comes before each turn."""
    import torch

    def decode(prompt: list[int], tokens: int) -> None:
        model.generate(torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    def measure(prompt: list[int]) -> float:
        prepare()
        return seconds_after_the_first(decode, prompt)

    return measure


def seconds_after_the_first(decode: Callable[[list[int], int], None], prompt: list[int]) -> float:
    took = []
    for tokens in (1, TOKENS):
        start = time.perf_counter()
        decode(prompt, tokens)
        took.append(time.perf_counter() - start)
    return (took[1] - took[0]) / (TOKENS - 1)


def by_vllm(artifact: Path, device: str) -> Ways:
    import engines
    from timing.decoding import time_tokens

    threads = max(1, (os.cpu_count() or 1) - 1)  # a core for who asks: without it a token waits for the scheduler
    engine: Any = engines.load("vllm", artifact, device, threads)
    from vllm import SamplingParams

    ends = list(engine.stop_ids)

    def call(forbidden: bool) -> Callable[[list[int]], float]:
        def decode(prompt: list[int], tokens: int) -> None:
            ending = {"min_tokens": tokens, "stop_token_ids": ends} if forbidden else {"ignore_eos": True}
            asked = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, **ending)
            (answer,) = engine.llm.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)
            assert len(answer.outputs[0].token_ids) == tokens

        return lambda prompt: seconds_after_the_first(decode, prompt)

    def steps(forbidden: bool) -> Callable[[list[int]], float]:
        def measure(prompt: list[int]) -> float:
            engine.ending = lambda n: {"min_tokens": n, "stop_token_ids": ends} if forbidden else {"ignore_eos": True}
            came = time_tokens(engine, [prompt], TOKENS).seconds
            return (came[-1] - came[0]) / (TOKENS - 1)

        return measure

    return {
        "by_hand": call(False),
        "row": steps(True),
        "by_hand_with_forbidden_ends": call(True),
        "row_with_ignored_ends": steps(False),
    }


def compare(found: dict[str, list[float]], rounds: int) -> dict[str, dict[str, Any]]:
    """Each way's times (ms, in every round one for each prompt), their median, and its speed beside the first way's."""
    medians = {name: np.median(np.reshape(each, (rounds, -1)), axis=1) for name, each in found.items()}
    first = next(iter(medians.values()))
    compared = {}
    for name, each in found.items():
        ratios = first / medians[name]
        compared[name] = {"ms": each, "median": statistics.median(each), "speed": float(np.median(ratios))}
        if len(ratios) >= bootstrap.MINIMUM:
            replicates = np.median(ratios[bootstrap.indices(len(ratios))], axis=1)
            compared[name]["speed_95"] = bootstrap.interval(replicates, len(ratios))
    return compared


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("artifact", type=Path)
    arguments.add_argument("--vllm", choices=("cpu", "cuda"), help="decode by vLLM on this device")
    arguments.add_argument("--rounds", type=int, default=3, help="of all ways, after one that warms up")
    options = arguments.parse_args()
    if options.rounds < 1:
        arguments.error("--rounds: write 1 or more")
    method = shards.read_json(options.artifact / "config.json").get("quantization_config", {}).get("quant_method")
    if not options.vllm and method not in METHODS:
        raise UserError(f"{options.artifact}: its quant_method is {method!r}; name an artifact of {', '.join(METHODS)}")
    told = shards.read_json(options.artifact.parent / "tokens/prompts.json")["prompts"]
    ways = by_vllm(options.artifact, options.vllm) if options.vllm else METHODS[method](options.artifact)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + options.rounds):
        for name, measure in ways.items():
            times = [1e3 * measure(prompt["ids"]) for prompt in told[:PROMPTS]]
            found[name] += times if turn else []
    publish_json(options.out, compare(found, options.rounds))


if __name__ == "__main__":
    run(main)
