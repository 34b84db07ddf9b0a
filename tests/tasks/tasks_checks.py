"""Run in envs/lm-eval: lm-evaluation-harness' own model `hf` on local tasks, one text at a time; its figures as JSON.

    python tests/tasks/tasks_checks.py MODEL INCLUDE OUT NAME...

Nothing of Quantmill's is imported.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "DISABLE_MULTIPROC": "1"}

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

model, include, out, *names = sys.argv[1:]
manager = TaskManager(include_path=include, include_defaults=False)
found = {}
for name in names:  # by themselves: it refuses a group beside one of its tasks
    results = simple_evaluate(
        model="hf",
        model_args={"pretrained": model, "dtype": "float32"},
        tasks=[name],
        task_manager=manager,
        device="cpu",
        batch_size=1,
        bootstrap_iters=1000,
    )
    samples = sorted(results["samples"].get(name, ()), key=lambda each: each["doc_id"])
    responses = [each["filtered_resps"] for each in samples]
    figures = {key: value for key, value in results["results"][name].items() if "," in key}
    found[name] = {"figures": figures, "responses": responses}
Path(out).write_text(
    json.dumps(found, default=lambda value: value.item() if isinstance(value, np.generic) else str(value))
)
