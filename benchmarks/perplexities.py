#!/usr/bin/env python3
"""Compare measured perplexities with other programs, on the same weights and text; write a table as JSON.

    python benchmarks/perplexities.py TEXT OUT artifacts/MODEL/quality/CELL.json …

Results of `llamacpp-512` are compared with llama.cpp's llama-perplexity, those of `lm-eval-word` with
lm-evaluation-harness' task `wikitext` in envs/lm-eval. TEXT is the study's, in WikiText's form for the second.
QUANTMILL_LLAMA_CPP names a folder of llamacpp.compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from quantmill import llamacpp
from quantmill.common import bounded_json, manifest
from quantmill.common.atomic import write_json
from quantmill.common.program import UserError, parser, run
from quantmill.llamacpp import files
from quantmill.tokens import wikitext

REPO = Path(__file__).resolve().parents[1]


def output(command: list[Any]) -> str:
    """Run another program; return its output. Raises `UserError` after its own message if it fails."""
    result = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise UserError(f"{command[0]}: failed with exit code {result.returncode}; its messages are above")
    return result.stdout


def by_llama_perplexity(artifact: Path, text: Path, windows: int) -> float:
    """Run llama-perplexity; return its figure after that many windows of 512.

    It exits without waiting for its printing thread, so its last lines can be lost. So it gets the text twice, and
    eight more windows than are read.
    """
    with tempfile.TemporaryDirectory() as folder:
        twice = Path(folder, "twice.txt")
        twice.write_bytes(text.read_bytes() * 2)
        command = [llamacpp.folder() / "bin/llama-perplexity", "-m", files.first(artifact), "-f", twice]
        told = output([*command, "-c", "512", "--chunks", windows + 8])
    figure = re.search(rf"\[{windows}\]([\d.]+)", told)
    if not figure:
        raise UserError(f"{text}: llama-perplexity tells nothing of window {windows}; is the text long enough?")
    return float(figure[1])


def by_harness(artifact: Path, text: Path, _windows: int) -> float:
    """Return the word perplexity of the task `wikitext`, over all pages, in float32."""
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder, "pages.jsonl")
        rows = (json.dumps({"page": page}) for page in wikitext.pages(text.read_text(encoding="utf-8")))
        pages.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        command = [REPO / "envs/lm-eval/bin/python", REPO / "benchmarks/lm_eval_wikitext.py", artifact, folder, pages]
        return json.loads(output(command).splitlines()[-1])[0]["word_perplexity"]


OTHERS = {
    "llamacpp-512": ("llama-perplexity", by_llama_perplexity),
    "lm-eval-word": ("lm-evaluation-harness", by_harness),
}


def row(path: Path, text: Path) -> dict[str, Any]:
    """Return the table's row of a quality result. Raises `UserError` for another file or protocol."""
    try:
        result = bounded_json.loads(path.read_bytes())
        protocol, ours = result["protocol"]["perplexity"], result["summary"]["perplexity"]
        windows = result["protocol"]["windows"]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path}: is not a quality result ({error!s:.80}); name artifacts/MODEL/quality/CELL.json"
        ) from None
    if result["protocol"].get("text_sha256") != manifest.sha256(text):
        raise UserError(f"{path}: was measured on another text than {text}; name the study's")
    if protocol not in OTHERS:
        raise UserError(f"{path}: no other program has the protocol {protocol}; measure by {' or '.join(OTHERS)}")
    name, measure = OTHERS[protocol]
    theirs = measure(path.parents[1] / path.stem.partition("@")[0], text, windows)
    return {
        "weights": path.stem,
        "protocol": protocol,
        "windows": windows,
        "Quantmill": round(ours, 4),
        "the other": round(theirs, 4),
        "ratio": round(ours / theirs, 6),
        "other program": name,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("text", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("results", type=Path, nargs="+", help="quality results of the protocols above")
    options = arguments.parse_args()
    write_json(options.out, [row(path, options.text) for path in options.results])


if __name__ == "__main__":
    run(main)
