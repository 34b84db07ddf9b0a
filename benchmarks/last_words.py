#!/usr/bin/env python3
"""Make a task from a local text, for studies without a network: predict a passage's last word, which occurred before.

    python benchmarks/last_words.py TEXT FOLDER [--skip CHARACTERS] [--passages 200]

writes FOLDER/last_words.yaml and .jsonl for `tasks: {names: [last_words], include: FOLDER}`. A passage is the beginning
of a line of TEXT, of 40 to 80 words, up to the first word of at least six letters that occurred before. `--skip` skips
the beginning of TEXT, which a study scores for its perplexity. As in LAMBADA (Paperno et al. 2016), an answer is
correct if each of the word's tokens is the likeliest.
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from quantmill.common.atomic import write_atomically
from quantmill.common.program import UserError, parser, run

LEAST, MOST, LETTERS = 40, 80, 6
TASK = """task: last_words
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{passage}}"
doc_to_target: " {{word}}"
metric_list: [{metric: acc}, {metric: perplexity}]
"""


def passage(line: str) -> dict[str, str] | None:
    """Return a line's passage and its last word, or None."""
    words = line.split()
    for place in range(LEAST, min(MOST, len(words))):
        if re.fullmatch(f"[A-Za-z]{{{LETTERS},}}", words[place]) and words[place] in words[:place]:
            return {"passage": " ".join(words[:place]), "word": words[place]}
    return None


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("text", type=Path)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--skip", type=int, default=0)
    arguments.add_argument("--passages", type=int, default=200)
    options = arguments.parse_args()

    try:
        lines = options.text.read_text(encoding="utf-8")[options.skip :].splitlines()[1:]
    except UnicodeDecodeError as error:
        raise UserError(f"{options.text}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    found = [each for line in lines if (each := passage(line))][: options.passages]
    if not found:
        raise UserError(f"{options.text}: no line has such a passage; name a text with a paragraph a line")
    rows = options.folder / "last_words.jsonl"
    written = {
        rows: "".join(f"{json.dumps(each)}\n" for each in found),
        options.folder / "last_words.yaml": TASK % json.dumps(rows.as_posix()),
    }
    for path, content in written.items():
        with write_atomically(path) as partial:
            partial.write_text(content, encoding="utf-8")
    print(f"{rows}: {len(found)} passages")


if __name__ == "__main__":
    run(main)
