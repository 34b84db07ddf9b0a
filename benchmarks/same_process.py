#!/usr/bin/env python3
"""Why a row and its library used by hand differ on a CPU: their ways to decode, in turn in one process, as JSON.

    envs/gptqmodel/bin/python benchmarks/same_process.py OUT artifacts/MODEL/gptq-int4
    envs/quantizers/bin/python benchmarks/same_process.py OUT artifacts/MODEL/bnb-int8

Of GPTQ: as gptqmodel loads it by itself, as the row does, and with the row's kernel in bfloat16. Of bitsandbytes: with
its warnings and without. Each decodes three prompts of the study, 64 tokens, in three rounds after one that warms up.
A time is that of a token after the first, in ms: an answer less its first token alone.
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

from checkpoint import shards
from common.program import UserError, parser, run
from common.publish import publish_json

THREADS, PROMPTS, TOKENS, ROUNDS = 2, 3, 64, 3

Ways = dict[str, tuple[Any, Callable[[], None]]]  # a model, and what precedes its turn


def by_gptqmodel(artifact: Path) -> Ways:
    os.environ |= {"GPTQMODEL_CPU_WORKERS": str(THREADS), "GPTQMODEL_OFFLINE": "1"}  # as rows have it; read at import
    import torch
    from gptqmodel import BACKEND, GPTQModel

    fused = {"backend": BACKEND.GPTQ_TORCH_FUSED}
    told: dict[str, dict[str, Any]] = {"by_hand": {}, "row": fused | {"dtype": torch.float32}}
    told["row_in_bfloat16"] = fused | {"dtype": torch.bfloat16}
    return {name: (GPTQModel.load(str(artifact), device="cpu", **each), lambda: None) for name, each in told.items()}


def by_bitsandbytes(artifact: Path) -> Ways:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)
    log = logging.getLogger("bitsandbytes")
    return {
        "with_warnings": (model, lambda: log.setLevel(logging.WARNING)),
        "without_warnings": (model, lambda: log.setLevel(logging.ERROR)),
    }


METHODS = {"gptq": by_gptqmodel, "bitsandbytes": by_bitsandbytes}


def milliseconds(model: Any, prompt: list[int]) -> float:
    """For each token after the first."""
    import torch

    ids, took = torch.tensor([prompt]), []
    for tokens in (1, TOKENS):
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        took.append(time.perf_counter() - start)
    return 1e3 * (took[1] - took[0]) / (TOKENS - 1)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("artifact", type=Path)
    options = arguments.parse_args()
    config = shards.read_json(options.artifact / "config.json")
    method = config.get("quantization_config", {}).get("quant_method")
    if method not in METHODS:
        raise UserError(f"{options.artifact}: its quant_method is {method!r}; name an artifact of {', '.join(METHODS)}")
    import torch

    told = shards.read_json(options.artifact.parent / "tokens/prompts.json")["prompts"]
    torch.set_num_threads(THREADS)
    ways = METHODS[method](options.artifact)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + ROUNDS):
        for name, (model, prepare) in ways.items():
            prepare()
            times = [milliseconds(model, prompt["ids"]) for prompt in told[:PROMPTS]]
            found[name] += times if turn else []
    publish_json(options.out, {name: {"ms": each, "median": statistics.median(each)} for name, each in found.items()})


if __name__ == "__main__":
    run(main)
