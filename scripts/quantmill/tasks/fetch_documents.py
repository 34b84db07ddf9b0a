"""Fetch the documents of a task of lm-evaluation-harness, at one commit of the hub.

    python scripts/quantmill tasks.fetch_documents NAME DST [--include FOLDER]

NAME is a task or a group of tasks, of lm-evaluation-harness or of the user's YAML files in FOLDER. DST becomes a folder
with the data sets as the library `datasets` saves them, documents.json (the tasks, their YAML files, the origin of each
data set) and a manifest. The task then runs offline.
"""

import json
from pathlib import Path

import datasets
import lm_eval

from quantmill.common import limited, manifest
from quantmill.common.atomic import write_atomically
from quantmill.common.program import parser
from quantmill.tasks import documents, harness


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("name")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--include", type=Path, help="a folder of the user's task YAMLs")
    options = arguments.parse_args()

    limited.supervise()  # templates are untrusted
    harness.restrain()
    with write_atomically(options.dst) as folder:
        folder.mkdir()
        with documents.fetch_data(folder) as origins:
            loaded = harness.load(options.name, options.include)
            sizes = {name: len(task.eval_docs) for name, task in loaded.tasks.items()}
        facts = {"name": options.name, "local": loaded.local, "documents": sizes, "data": origins}
        named = harness.name_files(loaded.files, options.include)
        facts |= {"files": named, "sha256": dict(zip(named, map(manifest.sha256, loaded.files), strict=True))}
        (folder / "documents.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        manifest.write(
            folder,
            format="documents",
            tool="fetch_documents",
            tool_version=f"lm-eval {lm_eval.__version__}, datasets {datasets.__version__}",
            parameters={"name": options.name},
            source={"kind": "tasks", "data": origins},
        )
