"""Run tasks of lm-evaluation-harness on an artifact, through the engine of its cell.

    python scripts/quantmill tasks.measure ARTIFACT OUT --engine ctranslate2 --python PYTHON --model MODEL --tasks TASKS
        --documents FOLDER... [--texts]

It runs in envs/lm-eval. The harness' own code makes the requests and computes the metrics. The engine, which --python
has, answers the requests (scripts/quantmill/tasks/worker.py). Answers are stored as they come in .CELL.answers.jsonl,
in the folder of OUT: an interrupted run resumes there, and a task that is added later sends only new requests.

TASKS is JSON, the study's config of that name. Each FOLDER is one that tasks.fetch_documents wrote.
"""

import json
import os
import random
from itertools import chain
from pathlib import Path
from typing import Any

# the harness' bootstrap runs in this process: each process of a pool would be a copy of it
os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "DISABLE_MULTIPROC": "1"}

import lm_eval
import numpy as np
import torch
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoConfig

from quantmill import engines
from quantmill.common import code_hash, limited, manifest, program, remote_code
from quantmill.common.atomic import write_json
from quantmill.common.program import PACKAGE, parser
from quantmill.metrics import METRICS_VERSION
from quantmill.tasks import answers, documents, harness, records
from quantmill.tasks.adapter import Adapter

BOOTSTRAP = 1000  # the harness' resamples, for metrics without a formula of the standard error
NO_PROBABILITIES = "its engine returns no probabilities of a given text"
NO_ENDS = "its engine always writes as many tokens as it is asked for"


def choose(loaded: harness.Loaded, limit: int | None, seed: int) -> dict[str, list[int]] | None:
    """Draw the numbers of each task's documents without replacement; None for all. They depend on the seed and the
    task's name and size alone, so that every cell and model gets the same."""
    if limit is None:
        return None
    found = {}
    for name, task in loaded.tasks.items():
        count = len(task.eval_docs)
        found[name] = sorted(random.Random(f"{seed} {name}").sample(range(count), min(limit, count)))
    return found


def why_not(loaded: harness.Loaded, facts: dict[str, Any]) -> str | None:
    """Return why an engine cannot answer a task, or None if it can."""
    written = {task.OUTPUT_TYPE == "generate_until" for task in loaded.tasks.values()}
    if False in written and not {"logits", "target_logprobs"} & {*facts["capabilities"]}:
        return NO_PROBABILITIES
    return NO_ENDS if True in written and not facts["ends"] else None


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("artifact", type=Path)
    arguments.add_argument("out", type=Path)
    engines.add_arguments(arguments)
    arguments.add_argument("--python", required=True, help="the Python that has the engine")
    arguments.add_argument("--model", type=Path, required=True, help="folder of the model's config.json and tokenizer")
    arguments.add_argument("--tasks", type=json.loads, required=True, help="JSON, as in the config")
    arguments.add_argument("--documents", type=Path, nargs="+", required=True, help="written by tasks.fetch_documents")
    arguments.add_argument("--seed", type=int, default=0, help="of the documents that a limit leaves")
    arguments.add_argument("--texts", action="store_true", help="store the requests, for the page")
    options = arguments.parse_args()

    limited.supervise()  # templates and tokenizers are untrusted
    asked, include = options.tasks, options.tasks.get("include")
    artifact = manifest.read_unchanged(options.artifact)
    module = PACKAGE / f"engines/{options.engine.replace('-', '_')}.py"
    files = [code_hash.closure(start, PACKAGE.parent) for start in (PACKAGE / "tasks/worker.py", module)]
    engine = {"engine": options.engine, "options": options.options, "gpus": options.gpus}
    remote_code.forbid()
    vocab = AutoConfig.from_pretrained(options.model).get_text_config().vocab_size
    command = [*program.command("tasks.worker", options.python), options.artifact, "--engine", options.engine]
    command += ["--vocab", vocab, "--options", json.dumps(options.options), "--gpus", options.gpus]
    command += ["--device", options.device, "--threads", options.threads]
    kept = options.out.with_name(f".{options.out.stem}.answers.jsonl")
    of = engine | {"files": artifact["files"], "made_of": code_hash.digest(*chain(*files))}
    harness.restrain()
    with answers.ask(command, kept, of) as told, documents.read_kept(options.documents):
        facts = [json.loads((folder / "documents.json").read_text(encoding="utf-8")) for folder in options.documents]
        folder = Path(include) if include else None
        loaded = [harness.load(each["name"], folder, harness.place(each["files"], include)) for each in facts]
        told.start()
        model = Adapter(options.model, told)
        found = {}
        for each in loaded:
            reason = why_not(each, told.facts)
            found[each.name] = {"reason": reason} if reason else evaluate_one(each, model, asked, options)
    write_json(
        options.out,
        {
            "kind": "tasks",
            "metrics_version": METRICS_VERSION,
            "artifact": artifact,
            **engine,
            "protocol": {"tasks": asked, "seed": options.seed},
            "summary": {"tasks": len(found)},
            "harness": {"lm-eval": lm_eval.__version__, "bootstrap": BOOTSTRAP},
            "data": [origin for each in facts for origin in each["data"]],
            **{name: told.facts[name] for name in ("compute_type", "versions", "device")},
            "tasks": found,
        },
    )


def evaluate_one(loaded: harness.Loaded, model: Adapter, asked: dict[str, Any], options: Any) -> dict[str, Any]:
    """Run a task or a group of them, and return its part of the result."""
    for task in loaded.tasks.values():
        harness.prepare(task, asked.get("num_fewshot"))
    random.seed(0)
    np.random.seed(harness.FEWSHOT_SEED)
    torch.manual_seed(harness.FEWSHOT_SEED)
    results = evaluate(
        lm=model,
        task_dict=TaskManager(include_defaults=False).load([loaded.item]),
        samples=choose(loaded, asked.get("limit"), options.seed),
        bootstrap_iters=BOOTSTRAP,
        apply_chat_template=bool(asked.get("chat_template")),
        fewshot_as_multiturn=bool(asked.get("chat_template")),
    )
    sizes = {name: len(task.eval_docs) for name, task in loaded.tasks.items()}
    metric = asked.get("metrics", {}).get(loaded.name)
    return records.of_name(loaded, results, metric, options.texts, sizes)
