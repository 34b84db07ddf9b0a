"""Run in envs/torch: the transformers engine on an artifact whose config.json was changed; a line of JSON for each.

python tests/engines/engine_configs_checks.py ARTIFACT WORK < CHANGES.json
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from quantmill import engines
from quantmill.common.program import UserError
from quantmill.quality import alignment

source, work = map(Path, sys.argv[1:])
ids = list(range(20, 60))
for number, change in enumerate(json.load(sys.stdin)):
    artifact = shutil.copytree(source, work / str(number))
    config = json.loads((artifact / "config.json").read_text()) | change
    (artifact / "config.json").write_text(json.dumps(config))
    try:
        engine = engines.load("transformers", artifact, "cpu", 1)
        tokens = [token for _, token, _ in engine.decode([ids], 5)]
        alignment.examine(engine, artifact, ids, None)
        found = {"tokens": tokens, "positions": sum(map(len, engine.logits(ids))), "stop_ids": engine.stop_ids}
    except UserError as error:
        found = {"error": str(error).replace(str(artifact), "ARTIFACT")}
    print(json.dumps(found))
