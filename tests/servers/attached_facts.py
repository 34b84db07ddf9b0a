"""Print an engine's facts about an attached server as JSON: python attached_facts.py ENGINE ARTIFACT OPTIONS

In an environment that has the tokenizers library. Every question is asked one after the other.
"""

import json
import sys
from pathlib import Path

from quantmill import engines
from quantmill.common.program import run

PROMPT = [0, 357, 1240, 823, 536]  # of the demo's tokenizer: The king went out
NEW = 8


def main() -> None:
    name, artifact, options = sys.argv[1:]
    engine = engines.load(name, Path(artifact), "cpu", 1, **json.loads(options))
    ids = [token for _, token, _ in engine.decode([PROMPT], NEW)]
    counted = {name: value for name, value in vars(engine.counters()).items() if value is not None}
    told = {"ids": ids, "text": engine.text, "versions": engine.versions(), "counters": counted}
    told["processes"] = sorted(engine.processes())
    if "target_logprobs" in engine.capabilities:
        scored = engine.target_logprobs(PROMPT)
        told["likelihood"] = {"tokens": scored.logprobs.tolist(), "likeliest": scored.top_ids[:, :2].tolist()}
        told["likelihood"]["top"] = list(scored.top_logprobs.shape)
    assert engine.startup_s is None
    engine.close()
    print(json.dumps(told))


if __name__ == "__main__":
    run(main)
