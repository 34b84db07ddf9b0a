#!/usr/bin/env python3
"""Score and check a model block by block in less memory than it takes as a whole; on a GPU also compare the times.

    envs/torch/bin/python benchmarks/streamed.py --limit-gb 4
    envs/torch/bin/python benchmarks/streamed.py --device cuda --limit-gb 8 --windows 32 --window 2048 --rounds 5
    envs/torch/bin/python benchmarks/streamed.py --table results/streamed.json results/streamed/*.jsonl

The model has the shape of Llama 2 7B (13.5 GB in float16) and random weights. Each step is a process of its own:
`expected` makes the predictions of the source that the quality gate compares with, `check` compares the engine with
them, and `score` writes the reference's states and its own row. On a CPU the limit is that of a control group where one
can be made; the peak, of resident memory, must be within the limit. On a GPU the limit and the peak are
those of torch's allocator. `whole` is `score` with the whole model in memory. Each step's time contains loading. The
last command makes the table of docs/FIGURES.md of what was printed.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

SHAPE = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32}
SHAPE |= {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096}
SHAPE |= {"eos_token_id": 2, "tie_word_embeddings": False}
GROUP = Path("/sys/fs/cgroup/memory/quantmill-streamed")  # version 1
GB = 10**9
PASSED = ("limit_gb", "windows", "window", "threads", "device")  # options of each step


def run_step(options: argparse.Namespace) -> dict[str, Any]:
    """Run one step in this process, and return its figures."""
    if options.group:
        (GROUP / "tasks").write_text("0")  # before libraries take memory
    started = time.perf_counter()
    import numpy as np
    import torch

    from quantmill import engines
    from quantmill.gate import expected, fidelity
    from quantmill.metrics.windows import gptq_2048
    from quantmill.quality import measure, teacher_forcing

    if options.device == "cuda" and options.step != "whole":
        torch.cuda.set_per_process_memory_fraction(options.limit_gb * GB / torch.cuda.mem_get_info()[1])
    model, kept = options.model, options.model.with_name("expected.json")
    ids = np.random.default_rng(0).integers(SHAPE["vocab_size"], size=options.window * options.windows).tolist()
    windows = gptq_2048(len(ids), options.window)
    text = teacher_forcing.Text(ids, windows, [float(window.last - window.first) for window in windows], {})
    asked = options.device, options.threads
    found: dict[str, Any] = {}
    if options.step == "expected":
        first = text.first(expected.WINDOWS)
        made = expected.predict(model, first, *asked, False, None, "")
        kept.write_text(json.dumps(made | {"against": "the source's weights"}))
    else:
        engine = engines.load("transformers", model, *asked)
        found["streamed"] = "weights" in engine.versions()
        if options.step == "check":
            first = text.first(expected.WINDOWS)
            reference = json.loads(kept.read_text())
            engine.read_ahead(first.inputs())
            predictions = fidelity.Predictions(engine, first, reference)
            found |= {"check": fidelity.check(reference, predictions, first, engine.compute_type)}
        else:
            engine.read_ahead(text.inputs())
            with tempfile.TemporaryDirectory() as folder:
                columns = measure.score_reference(engine, text, Path(folder, "kept"), options.device, "auto")
            found["nll"] = float(columns["nll"].mean())
    seconds = time.perf_counter() - started
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if options.device == "cuda":
        peak = torch.cuda.max_memory_reserved()
    return {"step": options.step, "seconds": round(seconds, 2), "peak_gb": round(peak / GB, 3), **found}


def rows(printed: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the rows of a table: the steps of each device. A CPU's seconds are left out, since it had other work."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for each in printed:
        gpu = each["device"] == "cuda"
        windows = f"{each['windows']} x {each['window']:,}"
        limit = "" if each["step"] == "whole" else f"{each['limit_gb']:.0f}"
        found["H200" if gpu else "CPU", windows, each["step"], limit].append(each)
    table = []
    for (device, windows, step, limit), several in found.items():
        seconds = [each["seconds"] for each in several]
        middle = f"{statistics.median(seconds):.1f}"
        middle += f", {min(seconds):.1f} to {max(seconds):.1f}" if len(seconds) > 1 else ""
        memory = f"{max(each['peak_gb'] for each in several):.2f}"
        names = {"device": device, "windows": windows, "step": step, "allowed, GB": limit, "taken, GB": memory}
        table.append(names | {"n": str(len(several)), "s": middle if device == "H200" else ""})
    return table


def make_model(folder: Path) -> None:
    """Write the model of random weights, if the folder is not there."""
    if folder.exists():
        return
    import transformers

    from quantmill.common.program import command

    config = folder.with_name("config.json")
    transformers.AutoConfig.for_model("llama", architectures=["LlamaForCausalLM"], **SHAPE).to_json_file(config)
    subprocess.run([*command("fetch.random_weights"), config, folder], check=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, help="a folder for the model, which is kept")
    arguments.add_argument("--limit-gb", type=float)
    arguments.add_argument("--windows", type=int, default=2)
    arguments.add_argument("--window", type=int, default=512)
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--step", help="run this step in this process, and print its figures")
    arguments.add_argument("--group", action="store_true", help="of a step: enter the control group")
    arguments.add_argument("--table", type=Path, nargs="+", metavar=("OUT", "PRINTED"))
    options = arguments.parse_args()
    if options.table:
        out, *files = options.table
        printed = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        out.write_text(json.dumps(rows(printed)) + "\n")
        return
    if options.step:
        print(json.dumps(run_step(options)))
        return
    if options.limit_gb is None:
        arguments.error("--limit-gb is missing")

    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder, "model")
        make_model(model)
        limit = int(options.limit_gb * GB)
        group = options.device == "cpu" and GROUP.parent.joinpath("memory.limit_in_bytes").exists()
        steps = ["expected", "check"] + options.rounds * ["score", *(["whole"] if options.device == "cuda" else [])]
        for step in steps:
            if group:
                GROUP.mkdir(exist_ok=True)
                (GROUP / "memory.limit_in_bytes").write_text(str(limit))
            program = [sys.executable, __file__, "--model", model, "--step", step, *(["--group"] if group else [])]
            program += [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in PASSED]
            result = subprocess.run(program, capture_output=True, text=True)
            if group:
                GROUP.rmdir()
            if result.returncode:
                sys.exit(f"{step}: ended with {result.returncode}: {result.stderr[-2000:]}")
            row = json.loads(result.stdout.splitlines()[-1]) | {"limit_gb": options.limit_gb, "control_group": group}
            row |= {"device": options.device, "windows": options.windows, "window": options.window}
            if step != "whole" and row["peak_gb"] > options.limit_gb:
                sys.exit(f"{step}: took {row['peak_gb']} GB")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
