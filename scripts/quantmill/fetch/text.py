"""Fetch a text from a data set on the Hugging Face Hub, at one commit.

    python scripts/quantmill fetch.text ORGANISATION/NAME FILE DST --revision COMMIT [--column text] [--documents N]
        [--join S]

FILE is one of the data set's files: .parquet, JSON lines (.jsonl or .json, also .gz) or plain text. Its documents, or
the first N of them, are joined by S (default: an empty line, as in published WikiText-2 perplexities). DST becomes a
folder with text.txt, rows.json (the length of each document) and its manifest.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
from pyarrow import parquet

from quantmill.common import manifest
from quantmill.common.atomic import write_atomically
from quantmill.common.program import UserError, parser
from quantmill.fetch import hub
from quantmill.tokens import plain_text

# pyarrow's and json's errors are ValueErrors
DAMAGE = (ValueError, TypeError, OSError, EOFError, RecursionError, zlib.error)
MAX_LINE = 64 * 2**20  # characters of a line of JSON; books have 5 million
MAX_TEXT = 2**30  # characters of a whole text


def documents(path: Path, name: str, column: str) -> Iterator[str]:
    """Yield the documents of a file, which the data set calls `name`. Raises `UserError` if it lacks the column."""
    try:
        if name.endswith(".parquet"):
            for batch in parquet.ParquetFile(path).iter_batches(columns=[column]):
                yield from batch.column(column).to_pylist()
        elif name.endswith((".json", ".jsonl", ".json.gz", ".jsonl.gz")):
            with (
                gzip.open(path, "rt", encoding="utf-8-sig")
                if name.endswith(".gz")
                else path.open(encoding="utf-8-sig") as file
            ):
                while line := file.readline(MAX_LINE):
                    if len(line) == MAX_LINE:
                        raise ValueError(f"a line has more than {MAX_LINE:,} characters")
                    if line.strip():
                        yield json.loads(line)[column]
        else:
            with path.open(encoding="utf-8") as file:
                yield file.read(MAX_TEXT + 1)
    except KeyError:
        raise UserError(f"{name}: has no column {column!r}; name one with `column`") from None
    except DAMAGE as error:
        raise UserError(f"{name}: cannot be read as its name says ({type(error).__name__}: {error!s:.100})") from None


def limit_characters(found: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield the same documents. Raises `UserError` as soon as they exceed `MAX_TEXT` characters."""
    characters = 0
    for document in found:
        characters += len(document) if isinstance(document, str) else 0
        if characters > MAX_TEXT:
            raise UserError(f"{name}: has more than {MAX_TEXT:,} characters; take fewer with `documents`")
        yield document


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("repository")
    arguments.add_argument("file")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--revision", required=True, help="branch, tag or commit")
    arguments.add_argument("--column", default="text")
    arguments.add_argument("--documents", type=int, help="as many from the beginning, at least 1; default: all")
    arguments.add_argument("--join", default="\n\n")
    options = arguments.parse_args()

    if options.documents is not None and options.documents < 1:
        raise UserError(f"--documents {options.documents}: take at least one")
    repository = hub.resolve(options.repository, options.revision, "dataset")
    if options.file not in repository.files:
        raise UserError(f"{options.repository}: holds no file {options.file}; its page lists those it has")
    path = hub.fetch(repository, [options.file])[options.file]
    found = documents(path, options.file, options.column)
    chosen = list(limit_characters(islice(found, options.documents), options.file))
    # half a surrogate pair cannot be written
    if not all(isinstance(each, str) and each.encode("utf-8", "ignore").decode("utf-8") == each for each in chosen):
        raise UserError(f"{options.file}: column {options.column!r} holds something that is not a text; name another")
    if number := next((number for number, document in enumerate(chosen, 1) if "\0" in document), None):
        raise UserError(
            f"{options.file}: document {number} of column {options.column!r} has a NUL; take fewer, or others"
        )
    chosen, join = [*map(plain_text.normalise, chosen)], plain_text.normalise(options.join)
    text = join.join(chosen)
    if not text.strip():
        raise UserError(f"{options.repository}: {options.file} holds no text in column {options.column!r}")
    with write_atomically(options.dst) as folder:
        folder.mkdir()
        (folder / "text.txt").write_text(text, encoding="utf-8", newline="")
        rows = {"join": join, "characters": [len(document) for document in chosen]}
        (folder / "rows.json").write_text(json.dumps(rows) + "\n", encoding="utf-8")
        manifest.write(
            folder,
            format="text",
            tool="fetch_text",
            tool_version=f"huggingface_hub {huggingface_hub.__version__}, pyarrow {pyarrow.__version__}",
            parameters={"column": options.column, "documents": options.documents, "join": options.join},
            source={
                "kind": "hub",
                "hub": repository.name,
                "revision": options.revision,
                "commit": repository.commit,
                "sha256": {options.file: manifest.sha256(path)},
            },
        )
