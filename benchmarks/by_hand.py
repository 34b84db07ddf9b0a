#!/usr/bin/env python3
"""Compare rows with the same library used by hand, on the same weights, prompts and device; write a table as JSON.

    python benchmarks/by_hand.py OUT artifacts/MODEL/latency/CELL.json… [--rounds 3] [--python vllm=/path/to/python]

For rows of vLLM (its class LLM), of ExLlamaV3 (its Generator), of gptqmodel, which chooses its kernel itself, and of
libraries that transformers loads (`generate` of the model). A row's artifact, engine and options are measured again
(latency.measure, one process), in turn with the library, so that a change of the machine affects both. By hand, TPOT is
the time of an answer minus the time of its first token alone. The row's TPOT is from its tokens' times, with decoding
driven by Python if it has several modes. Medians over five prompts, then over the rounds; the range is over rounds.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from quantmill.common import bounded_json
from quantmill.common.atomic import write_json
from quantmill.common.program import UserError, parser, run

ENVIRONMENTS = {"transformers": "torch", "torchao": "quantizers", "bitsandbytes": "quantizers", "vllm": "vllm"}
ENVIRONMENTS |= {"exllamav3": "exllamav3", "gptqmodel": "gptqmodel"}
PROMPTS = 5
RATES = ("tokens/s after the first", "by hand", "ratio")
MODES = ("generate", "eager", "vLLM", "generator")
FLOATS = ("float32", "float16", "bfloat16")
OWN = "_shared_heads"  # Quantmill's own way to call an attention of transformers
LATENCY = [str(Path(__file__).resolve().parents[1] / "scripts/quantmill"), "latency.measure"]
SAID = "by hand: "  # what libraries print goes to the same place

Decode = Callable[[list[int], int], None]  # prompt, and number of tokens


def by_transformers(artifact: Path, row: dict[str, Any]) -> Decode:
    """Decode by `generate`, in the row's dtype and with its attention."""
    import torch
    from transformers import AutoModelForCausalLM

    device = row["device"]["device"]
    if device == "cpu":
        torch.set_num_threads(row["device"]["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        artifact,
        dtype=dtype(row),
        attn_implementation=row["versions"]["attention"].removesuffix(OWN),
        device_map=None if device == "cpu" else device,
    )
    return generate(model, device)


def dtype(row: dict[str, Any]) -> str:
    """Return the dtype that a row's model was loaded in.

    It may differ from `compute_type`: on a CPU, 4-bit layers may multiply bfloat16 in a model of float32.
    """
    if row["device"]["device"] == "cpu":
        own = "float32"
    else:
        own = row["compute_type"] if row["compute_type"] in FLOATS else "float16"
    return row["options"].get("dtype", own)


def by_gptqmodel(artifact: Path, row: dict[str, Any]) -> Decode:
    """Decode by `generate` of gptqmodel's model."""
    import torch
    from gptqmodel import GPTQModel

    device = row["device"]["device"]
    if device == "cpu":
        torch.set_num_threads(row["device"]["threads"])
    return generate(GPTQModel.load(str(artifact), device=device), device)


def generate(model: Any, device: str) -> Decode:
    """Decode as in transformers' manual."""
    import torch

    def decode(prompt: list[int], tokens: int) -> None:
        ids = torch.tensor([prompt], device=device)
        answer = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        assert answer.shape[1] == len(prompt) + tokens
        if device == "cuda":
            torch.cuda.synchronize()

    return decode


def by_vllm(artifact: Path, row: dict[str, Any]) -> Decode:
    """Decode by `LLM.generate` with the row's options, without a prefix cache: the first token alone would fill it."""
    if row["device"]["device"] == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM would take nearly all memory
    from vllm import LLM, SamplingParams

    llm = LLM(str(artifact), skip_tokenizer_init=True, **{"enable_prefix_caching": False} | row["options"])

    def decode(prompt: list[int], tokens: int) -> None:
        asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        (answer,) = llm.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == tokens

    return decode


def by_exllamav3(artifact: Path, row: dict[str, Any]) -> Decode:
    """Decode by jobs of one generator, one at a time. It caches the prompts that it has seen."""
    import torch

    from quantmill.exllamav3 import library

    library()
    from exllamav3 import Cache, Config, Generator, GreedySampler, Job, Model, Tokenizer

    model = Model.from_config(Config.from_directory(str(artifact)))
    cache = Cache(model, max_num_tokens=8192)
    model.load()
    generator = Generator(model=model, cache=cache, tokenizer=Tokenizer.from_config(model.config))

    def decode(prompt: list[int], tokens: int) -> None:
        generator.enqueue(Job(torch.tensor([prompt]), max_new_tokens=tokens, sampler=GreedySampler()))
        told = 0
        while generator.num_remaining_jobs():
            told = max([told, *(result.get("new_tokens", 0) for result in generator.iterate())])
        assert told == tokens

    return decode


BY_HAND = {"vllm": by_vllm, "exllamav3": by_exllamav3, "gptqmodel": by_gptqmodel}  # of other engines, by transformers


def seconds_by_hand(artifact: Path, row: dict[str, Any]) -> float:
    """Return the TPOT of the answer."""
    told = json.loads((artifact.parent / "tokens/prompts.json").read_text(encoding="utf-8"))["prompts"]
    prompts = [prompt["ids"] for prompt in told[:PROMPTS]]
    os.environ |= row["options"].pop("environment", {})
    decode = BY_HAND.get(row["engine"], by_transformers)(artifact, row)
    tokens = row["protocol"]["new_tokens"]
    found = []
    for number, prompt in enumerate([prompts[0], *prompts]):
        took = []
        for asked in (1, 1, tokens):  # the first fills caches of prompts
            start = time.perf_counter()
            decode(prompt, asked)
            took.append(time.perf_counter() - start)
        if number:  # the first warms up
            found.append((took[2] - took[1]) / (tokens - 1))
    return statistics.median(found)


def seconds_of_row(row: dict[str, Any]) -> tuple[str, float]:
    """Return the compared mode and its TPOT."""
    mode = next(each for each in (row, *row["other_modes"]) if each["mode"] in MODES)
    times = [run["token_seconds"] for run in mode["runs"] if run["prompt"] < PROMPTS]
    return mode["mode"], statistics.median((each[-1] - each[0]) / (len(each) - 1) for each in times)


def measure_again(artifact: Path, row: dict[str, Any], python: str) -> tuple[str, float] | None:
    """Measure the row again; return the result of `seconds_of_row`, or None after a failure, which is printed."""
    protocol, device = row["protocol"], row["device"]["device"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        latency = {"new_tokens": protocol["new_tokens"], "repeats": 1, "processes": 1, "decode": "generate"}
        told = {
            "engine": row["engine"],
            "options": json.dumps(row["options"]),
            "gpus": row["gpus"],
            "device": device,
            "prompts": artifact.parent / "tokens/prompts.json",
            "evaluation": artifact.parent / "tokens/evaluation.json",
            "latency": json.dumps(latency | {"prompt_tokens": [], "batch_sizes": [1]}),
        }
        if device == "cpu":
            told["threads"] = row["device"]["threads"]
        words = [f"--{name}={value}" for name, value in told.items()]
        result = subprocess.run([python, *LATENCY, str(artifact), str(out), *words], stdout=subprocess.DEVNULL)
        return None if result.returncode else seconds_of_row(bounded_json.loads(out.read_bytes()))


def measure_by_hand(artifact: Path, path: Path, python: str) -> float | None:
    """Measure the library by hand, without Quantmill."""
    command = [python, __file__, "--alone", str(artifact), str(path)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    said = [line.removeprefix(SAID) for line in result.stdout.splitlines() if line.startswith(SAID)]
    return float(said[0]) if said else None


def compare(path: Path, pythons: dict[str, str], rounds: int) -> Iterator[dict[str, str]]:
    """Yield the table's row of a latency result after each round.

    Raises `UserError` for another file, engine or way to decode.
    """
    cells = {"model": path.parents[1].name, "row": f"`{path.stem}`", "mode": "not measured", **dict.fromkeys(RATES, "")}
    if not path.exists():  # a study that goes on without the rows that failed
        yield cells
        return
    try:
        row = bounded_json.loads(path.read_bytes())
        engine, _ = row["engine"], seconds_of_row(row)
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        said = f"{error!s:.80}" or f"has none of the modes {', '.join(MODES)}"
        raise UserError(f"{path}: is not a latency result ({said}); name artifacts/MODEL/latency/CELL.json") from None
    if engine not in ENVIRONMENTS:
        raise UserError(f"{path}: no other way to use {engine} is here; name rows of {', '.join(ENVIRONMENTS)}")
    env = ENVIRONMENTS[engine]
    if env == "vllm" and row["device"]["device"] == "cpu":
        env = "vllm-cpu"
    python = pythons.get(env, f"envs/{env}/bin/python")
    if shutil.which(python) is None:
        raise UserError(f"{python}: is not a program; name a Python that has {engine} with --python {env}=INTERPRETER")
    artifact = path.parents[1] / path.stem.partition("@")[0]
    ours, theirs = [], []
    for _ in range(rounds):
        mine, others = measure_again(artifact, row, python), measure_by_hand(artifact, path, python)
        if mine is None or others is None:
            said = ["failed" if each is None else f"{1 / each:.1f}" for each in (mine and mine[1], others)]
            yield cells | dict(zip(RATES, said, strict=False))
            return
        cells["mode"], seconds = mine
        ours.append(seconds)
        theirs.append(others)
        ratios = [hand / mine for mine, hand in zip(ours, theirs, strict=True)]
        spread = f" ({min(ratios):.3f} to {max(ratios):.3f})" if len(ratios) > 1 else ""
        rates = [f"{1 / statistics.median(each):.1f}" for each in (ours, theirs)]
        yield cells | dict(zip(RATES, [*rates, f"{statistics.median(ratios):.3f}{spread}"], strict=True))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("out", type=Path, help="the table")
    arguments.add_argument("rows", type=Path, nargs="+", help="latency results")
    arguments.add_argument("--rounds", type=int, default=3, help="rounds of both, in turn")
    arguments.add_argument("--python", action="append", default=[], help="ENVIRONMENT=its interpreter")
    arguments.add_argument(
        "--alone", action="store_true", help="measure by hand only; OUT is an artifact, and its row follows"
    )
    options = arguments.parse_args()
    if options.alone:
        if len(options.rows) != 1:
            arguments.error("--alone: name an artifact and its row")
        (row,) = options.rows
        print(f"{SAID}{seconds_by_hand(options.out, json.loads(row.read_text(encoding='utf-8')))}", flush=True)
        return
    if options.rounds < 1:
        arguments.error("--rounds: write 1 or more")
    pythons = dict(each.partition("=")[::2] for each in options.python)
    if not all(pythons.values()):
        arguments.error("--python: write ENVIRONMENT=INTERPRETER")
    found = []
    for path in options.rows:
        for cells in compare(path, pythons, options.rounds):
            write_json(options.out, [*found, cells])  # each time: a machine that is lent may be taken back
        found.append(cells)
        print(*cells.values(), sep="  ", flush=True)


if __name__ == "__main__":
    run(main)
