"""Publish artifacts of a model to a repository of the Hugging Face Hub, with their card, figures and hashes.

    python scripts/quantmill publish.push RECEIPT --repository ORG/NAME --model MODEL --layout gptq --results
        results.json
        [--source FOLDER] [--license ID] [--base-model ORG/NAME] [--public] [--overwrite]
        ARTIFACT …

ARTIFACT is a folder of the workflow; for the layout gguf there may be several. FOLDER is the checkpoint as its author
published it, which names the licence. The token is that of HF_TOKEN or `hf auth login`. The hub's files are compared
with the local ones before anything is sent, and every hash afterwards. RECEIPT is written last.
"""

import json
import sys
from pathlib import Path

from quantmill.common import plain_file
from quantmill.common.atomic import MANIFEST, write_json
from quantmill.common.program import UserError, parser, printable
from quantmill.publish import contents, licence, model_card, public, remote
from quantmill.report import axes, drawing, page

MAX_RESULTS = 32 * 2**20  # bytes of a results.json


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("receipt", type=Path, help="file to write: the commit, and each file's hash")
    arguments.add_argument("artifacts", type=Path, nargs="+", help="folders")
    arguments.add_argument("--repository", required=True)
    arguments.add_argument("--model", required=True, help="its name in the study")
    arguments.add_argument("--layout", required=True)
    arguments.add_argument(
        "--library", default="transformers", help="library that loads this layout, by the hub's name"
    )
    arguments.add_argument("--results", type=Path, required=True, help="the report's results.json")
    arguments.add_argument("--source", type=Path, help="folder of the checkpoint, for its licence")
    arguments.add_argument("--license", help="licence to name instead of the source's")
    arguments.add_argument("--base-model", help="repository of the hub; default: the source's")
    arguments.add_argument("--public", action="store_true", help="make a public repository")
    arguments.add_argument("--overwrite", action="store_true", help="remove all other files of the repository")
    options = arguments.parse_args()
    if not (options.license or options.source):
        raise UserError("--license: is required without --source")

    terms = licence.find(options.source, options.license)
    artifacts = [contents.read(options.model, folder) for folder in options.artifacts]
    results = json.loads(plain_file.read(options.results, MAX_RESULTS))
    for each in artifacts:
        if each.left_out:
            print(printable(f"{each.folder}: not uploaded, because no engine needs it: {', '.join(each.left_out)}"))
    names = [each.name for each in artifacts]
    allowed = public.of_study(results)
    shown = public.results(results, options.model, names, allowed)
    if missing := set(names) - {row["format"] for row in shown["rows"]}:
        raise UserError(f"{options.results}: has no row of {', '.join(sorted(missing))}; make the report again")
    files: dict[str, Path | bytes] = {name: path for each in artifacts for name, path in each.files.items()}
    measured = [row for row in results["rows"] if row["model"] == options.model]
    files |= contents.beside(shown, options.source, drawing.draw(axes.points(measured)).png)
    hashes = contents.hashes(artifacts, files)
    files[contents.CARD] = model_card.render(
        options.repository,
        options.model,
        options.layout,
        options.library,
        artifacts,
        shown,
        terms,
        options.base_model or artifacts[0].manifest["source"].get("hub"),
        page.commit(),
        hashes,
        allowed,
    ).encode()
    hashes[contents.CARD] = contents.entry(files[contents.CARD])
    files[MANIFEST] = contents.describe(options.model, options.layout, artifacts, hashes, allowed)
    hashes[MANIFEST] = contents.entry(files[MANIFEST])
    public.check(files)
    for withheld in dict.fromkeys(allowed.withheld):
        print(f"not published: {printable(withheld)}", file=sys.stderr)
    pushed = remote.push(options.repository, files, hashes, not options.public, options.overwrite)
    write_json(options.receipt, {"repository": options.repository, "commit": pushed.commit, "files": hashes})
    done = f"{len(pushed.sent)} of {len(files)} files sent" if pushed.sent or pushed.removed else "nothing to send"
    print(f"{options.repository}: {done}; commit {pushed.commit}, every hash is that of the local file")
