"""Print an engine's facts about an artifact as JSON: python engine_facts.py ENGINE ARTIFACT EVALUATION OPTIONS"""

import json
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from quantmill import engines
from quantmill.common.program import run
from quantmill.devices import cpu, processes
from quantmill.quality import teacher_forcing

WINDOWS = 8
NEW = 48
PROMPTS = ((5, 40), (300, 330), (1000, 1030))  # places of the text; the last two are decoded together


def main() -> None:
    name, artifact, evaluation, options = sys.argv[1:]
    text = teacher_forcing.read_text(Path(evaluation), "gptq-2048").first(WINDOWS)
    engine = engines.load(name, Path(artifact), "cpu", cpu.available_threads(), **json.loads(options))
    prompts = [text.ids[start:stop] for start, stop in PROMPTS]
    alone = [[token for _, token, _ in engine.decode([ids], NEW)] for ids in prompts]
    came = list(engine.decode(prompts[1:], NEW))
    together = [[token for number, token, _ in came if number == place] for place in range(len(prompts) - 1)]
    facts = {
        "alone": alone,
        "together": together,
        "ordered": all(now[2] <= later[2] for now, later in pairwise(came)),
        "compute_type": engine.compute_type,
        "weight_bytes": engine.weight_bytes(),
        "versions": engine.versions(),
        "peak_bytes": processes.peak_rss_bytes(engine.processes()),
        "stop_ids": list(engine.stop_ids),
        "prompts": prompts,
        "counters": asdict(engine.counters()) if hasattr(engine, "counters") else None,
    }
    if "logits" in engine.capabilities:
        pairs = [(chunk.logits.copy(), chunk.targets) for chunk in teacher_forcing.chunks(engine, text)]
        rows, targets = (np.concatenate(each) for each in zip(*pairs, strict=True))
        rows = rows.astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        nll = np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(len(rows)), targets]
        facts |= {"nll": float(nll.mean()), "likeliest": rows.argmax(axis=1).tolist()}
    elif "target_logprobs" in engine.capabilities:
        found = [each for _, each, _ in teacher_forcing.targets(engine, text)]
        facts["nll"] = float(-np.concatenate([each.logprobs for each in found]).mean())
        facts["likeliest"] = np.concatenate([each.top_ids[:, 0] for each in found]).tolist()
    engine.close()
    print(json.dumps(facts))


if __name__ == "__main__":
    run(main)
