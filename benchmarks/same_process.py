#!/usr/bin/env python3
"""Compare a row's decoding with its library used by hand, in turn in one process, to explain differences, as JSON.

    envs/gptqmodel/bin/python benchmarks/same_process.py OUT artifacts/MODEL/gptq-int4
    envs/quantizers/bin/python benchmarks/same_process.py OUT artifacts/MODEL/bnb-int8
    envs/quantizers/bin/python benchmarks/same_process.py OUT artifacts/MODEL/torchao-fp8 --transformers cuda
    envs/vllm/bin/python benchmarks/same_process.py OUT artifacts/MODEL/awq-int4 --vllm cuda

GPTQ on a CPU: as gptqmodel loads it by itself, as the row does, and with the row's kernel in bfloat16. bitsandbytes on
a CPU: with its warnings and without. transformers and the libraries in it (bitsandbytes, torchao, HQQ): `generate` of
the model as the library makes it (by hand), the row, and `generate` of the row's model; HQQ makes its model from the
fp16 artifact next to it. vLLM: one call that returns the answer (by hand), and one step at a time (the row), each with
EOS ignored, or forbidden until the answer is long enough (the row).

Each way decodes 64 tokens after three prompts of the study, in each round after a warm-up. A time is the TPOT in ms: of
an answer minus its first token alone, or of the row's steps from first to last. `speed` is relative to the first way:
the median of the rounds, each by the medians of its prompts, with a 95% interval by bootstrap. `versions` and `device`
are as in a row.
"""

import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import numpy as np

from quantmill import devices, engines
from quantmill.checkpoint import shards
from quantmill.common import manifest
from quantmill.common.atomic import write_json
from quantmill.common.program import UserError, parser, run
from quantmill.metrics import bootstrap

THREADS, PROMPTS = 2, 3

Measure = Callable[[list[int], int], float]  # prompt and number of tokens -> TPOT in seconds
Ways = dict[str, Measure]
Versions = dict[str, str]


def by_gptqmodel(artifact: Path) -> tuple[Ways, Versions]:
    os.environ |= {"GPTQMODEL_CPU_WORKERS": str(THREADS), "GPTQMODEL_OFFLINE": "1"}  # as rows have it; read at import
    import torch
    from gptqmodel import BACKEND, GPTQModel

    torch.set_num_threads(THREADS)
    fused = {"backend": BACKEND.GPTQ_TORCH_FUSED}
    told: dict[str, dict[str, Any]] = {"by_hand": {}, "row": fused | {"dtype": torch.float32}}
    told["row_in_bfloat16"] = fused | {"dtype": torch.bfloat16}
    ways = {name: generate(GPTQModel.load(str(artifact), device="cpu", **each)) for name, each in told.items()}
    return ways, library_versions("gptqmodel")


def by_bitsandbytes(artifact: Path) -> tuple[Ways, Versions]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)
    log = logging.getLogger("bitsandbytes")
    ways = {
        "with_warnings": generate(model, lambda: log.setLevel(logging.WARNING)),
        "without_warnings": generate(model, lambda: log.setLevel(logging.ERROR)),
    }
    return ways, library_versions("bitsandbytes")


def library_versions(library: str) -> Versions:
    """Return the versions of a library in transformers, and of transformers and torch."""
    return {name: version(name) for name in (library, "transformers", "torch")}


def by_transformers(artifact: Path, device: str, threads: int) -> tuple[Ways, Versions]:
    told = manifest.read(artifact)
    engine: Any = engines.load(told["engine"], artifact, device, threads)
    engine.mode = "generate"
    from transformers import AutoModelForCausalLM

    quantized_at_load = told["engine"] == "hqq"  # transformers does not load its files
    path = artifact.parent / "fp16" if quantized_at_load else artifact
    attention = engine.versions()["attention"]
    place = {} if device == "cpu" else {"device_map": device}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=engine.dtype, attn_implementation=attention, **place)
    if quantized_at_load:
        from hqq.core.quantize import BaseQuantizeConfig
        from hqq.models.hf.base import AutoHQQHFModel

        config = BaseQuantizeConfig(**{name: told["parameters"][name] for name in ("nbits", "group_size")}, axis=1)
        AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=engine.dtype, device=device)

    ways = {"by_hand": generate(model), "row": steps(engine), "row_model_by_hand": generate(engine.model)}
    return ways, engine.versions()


METHODS = {"gptq": by_gptqmodel, "bitsandbytes": by_bitsandbytes}


def generate(model: Any, prepare: Callable[[], None] = lambda: None) -> Measure:
    """Time `generate` of a model; `prepare` is called before each turn."""
    import torch

    def decode(prompt: list[int], tokens: int) -> None:
        ids = torch.tensor([prompt], device=model.device)
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    def measure(prompt: list[int], tokens: int) -> float:
        prepare()
        return seconds_after_the_first(decode, prompt, tokens)

    return measure


def steps(engine: Any, prepare: Callable[[], None] = lambda: None) -> Measure:
    """Time a row's engine by the times of its tokens."""
    from quantmill.latency.decoding import time_tokens

    def measure(prompt: list[int], tokens: int) -> float:
        prepare()
        came = time_tokens(engine, [prompt], tokens).seconds
        return (came[-1] - came[0]) / (tokens - 1)

    return measure


def seconds_after_the_first(decode: Callable[[list[int], int], None], prompt: list[int], tokens: int) -> float:
    took = []
    for asked in (1, tokens):
        start = time.perf_counter()
        decode(prompt, asked)
        took.append(time.perf_counter() - start)
    return (took[1] - took[0]) / (tokens - 1)


def by_vllm(artifact: Path, device: str, threads: int, options: dict[str, Any]) -> tuple[Ways, Versions]:
    engine: Any = engines.load("vllm", artifact, device, threads, **options)
    from vllm import SamplingParams

    ends = list(engine.stop_ids)

    def call(forbidden: bool) -> Measure:
        def decode(prompt: list[int], tokens: int) -> None:
            ending = {"min_tokens": tokens, "stop_token_ids": ends} if forbidden else {"ignore_eos": True}
            asked = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, **ending)
            (answer,) = engine.llm.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)
            assert len(answer.outputs[0].token_ids) == tokens

        return lambda prompt, tokens: seconds_after_the_first(decode, prompt, tokens)

    def row(forbidden: bool) -> Measure:
        def prepare() -> None:
            engine.ending = lambda n: {"min_tokens": n, "stop_token_ids": ends} if forbidden else {"ignore_eos": True}

        return steps(engine, prepare)

    ways = {
        "by_hand": call(False),
        "row": row(True),
        "by_hand_with_forbidden_ends": call(True),
        "row_with_ignored_ends": row(False),
    }
    return ways, engine.versions()


def compare(found: dict[str, list[float]], rounds: int) -> dict[str, dict[str, Any]]:
    """Return each way's times (ms, per round and prompt), their median, and its speed relative to the first way."""
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
    library = arguments.add_mutually_exclusive_group()
    library.add_argument("--transformers", choices=("cpu", "cuda"), help="decode by transformers on this device")
    library.add_argument("--vllm", choices=("cpu", "cuda"), help="decode by vLLM on this device")
    arguments.add_argument("--options", type=engines.parse_options, default={}, help="of vLLM, as JSON")
    arguments.add_argument("--rounds", type=int, default=3, help="rounds of all ways, after a warm-up")
    arguments.add_argument("--tokens", type=int, default=64, help="of an answer, 2 or more")
    options = arguments.parse_args()
    if options.rounds < 1:
        arguments.error("--rounds: write 1 or more")
    if options.tokens < 2:
        arguments.error("--tokens: write 2 or more")
    if options.options and not options.vllm:
        arguments.error("--options: goes with --vllm")
    method = shards.read_json(options.artifact / "config.json").get("quantization_config", {}).get("quant_method")
    if not (options.vllm or options.transformers) and method not in METHODS:
        raise UserError(f"{options.artifact}: its quant_method is {method!r}; name an artifact of {', '.join(METHODS)}")
    told = shards.read_json(options.artifact.parent / "tokens/prompts.json")["prompts"]
    cores, threads = os.cpu_count() or 1, THREADS
    if options.vllm:
        threads = max(1, cores - 1)  # a core for who asks: without it a token waits for the scheduler
        ways, versions = by_vllm(options.artifact, options.vllm, threads, options.options)
    elif options.transformers:
        threads = cores
        ways, versions = by_transformers(options.artifact, options.transformers, threads)
    else:
        ways, versions = METHODS[method](options.artifact)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + options.rounds):
        for name, measure in ways.items():
            times = [1e3 * measure(prompt["ids"], options.tokens) for prompt in told[:PROMPTS]]
            found[name] += times if turn else []
    device = devices.describe(options.vllm or options.transformers or "cpu", threads)
    write_json(options.out, compare(found, options.rounds) | {"versions": versions, "device": device})


if __name__ == "__main__":
    run(main)
