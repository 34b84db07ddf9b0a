"""Run lm-evaluation-harness's task `wikitext` on pages of local files, in envs/lm-eval; print its figures as JSON.

    python benchmarks/lm_eval_wikitext.py MODEL CACHE PAGES.jsonl...

The data set has a page per row; everything else is the task's. `add_bos_token=False` was the fixed behaviour of earlier
versions: without it, a tokenizer that adds BOS to every text gives two of them, and the second one is scored.
"""

import json
import os
import sys

os.environ |= {"HF_HOME": sys.argv[2], "HF_DATASETS_OFFLINE": "1"}

import lm_eval
from lm_eval.tasks.wikitext import preprocess_wikitext


def task(number: int, path: str) -> dict:
    return {
        "task": f"wikitext_{number}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": path}},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": preprocess_wikitext.wikitext_detokenizer,
        "process_results": preprocess_wikitext.process_results,
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    }


results = lm_eval.simple_evaluate(
    model="hf",
    model_args={"pretrained": sys.argv[1], "dtype": "float32", "add_bos_token": False},
    tasks=[task(number, path) for number, path in enumerate(sys.argv[3:])],
    device="cpu",
    batch_size=1,
    bootstrap_iters=0,
    log_samples=False,
)["results"]
found = [results[f"wikitext_{number}"] for number in range(len(results))]
print(json.dumps([{key.partition(",")[0]: value for key, value in each.items()} for each in found]))
