#!/usr/bin/env python3
"""Tokenise a text once, with the model's own tokenizer; every engine then gets these ids and never the text.

    python scripts/tokenize_texts.py MODEL TEXT DST --as prompts|document|evaluation

`prompts` is one prompt a line (empty lines are skipped), `document` one text; `evaluation` also has its documents one
by one (scripts/common/documents.py), without special tokens, for the protocol that scores those. A byte order mark at
the beginning is dropped, and lines end in LF, whatever ended them. A beginning-of-sequence token is there only if the
model's tokenizer puts it there. Random weights that come without a tokenizer get random ids, one for every four bytes
of the text, which is about what a vocabulary of 32,000 makes of English.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from common import documents, manifest, own_code, plain_text
from common.program import UserError, first_line, parser, run
from common.publish import publish_json

BYTES_A_TOKEN = 4
SHORTEST = 32  # tokens of a context; no language model has fewer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them makes a tokenizer


def load_tokenizer(model: Path) -> transformers.PreTrainedTokenizerBase | None:
    """The model's tokenizer; none where random weights came without one. Raises `UserError` where it is damaged."""
    if manifest.read(model)["source"].get("tokenizer") is False:
        return None
    if not any((model / name).exists() for name in TOKENIZER_FILES):
        raise UserError(f"{model}: holds no tokenizer ({', '.join(TOKENIZER_FILES)}); copy it beside the weights")
    transformers.logging.set_verbosity_error()  # or a document longer than the context draws a warning
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except Exception as error:  # whatever its many tokenizer classes raise
        raise UserError(f"{model}: transformers cannot read its tokenizer ({first_line(error)})") from None
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        raise UserError(f"{model}: tokenizer_class {type(tokenizer).__name__} is no tokenizer; download it again")
    return tokenizer


def load_config(model: Path) -> transformers.PretrainedConfig:
    """The config of the model's language part, its keys under transformers' common names."""
    try:
        return transformers.AutoConfig.from_pretrained(model).get_text_config()
    except Exception as error:  # whatever its many config classes raise
        raise UserError(f"{model}: transformers cannot read its config.json ({first_line(error)})") from None


def context(config: transformers.PretrainedConfig, model: Path) -> int | None:
    """Tokens that the model was made for; none where its config does not say."""
    tokens = getattr(config, "max_position_embeddings", None)
    if tokens is not None and (type(tokens) is not int or tokens < SHORTEST):
        raise UserError(
            f"{model}: max_position_embeddings is {tokens!r:.60}, not {SHORTEST} or more; download it again"
        )
    return tokens


def vocabulary(config: transformers.PretrainedConfig, model: Path) -> int:
    """Tokens that the model knows. Raises `UserError` where its config tells of none."""
    size = getattr(config, "vocab_size", None)
    if type(size) is not int or not 0 < size < 2**31:
        raise UserError(f"{model}: vocab_size is {size!r:.60}, no number of tokens; download it again")
    return size


def random_ids(vocab_size: int, text: str) -> list[int]:
    """Ids for a text of a model without a tokenizer; the same for the same vocabulary and text."""
    raw = text.encode()
    generator = np.random.default_rng([vocab_size, *hashlib.sha256(raw).digest()])
    return generator.integers(vocab_size, size=max(1, round(len(raw) / BYTES_A_TOKEN))).tolist()


def parts_of(path: Path, text: str) -> list[str]:
    """The rows of the data set that a folder of fetch_text.py's came from; of a file, the text."""
    if not path.is_dir():
        return [text]
    parts, place = [], 0
    rows = json.loads((path / "rows.json").read_text(encoding="utf-8"))
    for length in rows["characters"]:
        parts.append(text[place : place + length])
        place += length + len(rows["join"])
    return parts


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", type=Path, help="folder that holds config.json and the tokenizer")
    arguments.add_argument("text", type=Path, help="a text, or a folder that fetch_text.py wrote")
    arguments.add_argument("dst", type=Path, help="JSON file to write")
    arguments.add_argument("--as", dest="kind", choices=["prompts", "document", "evaluation"], required=True)
    options = arguments.parse_args()

    path = options.text / "text.txt" if options.text.is_dir() else options.text
    try:
        text = plain_text.read(path)
    except plain_text.NotPlain as error:
        raise UserError(f"{path}: {error}") from None
    raw = text.encode()
    own_code.forbid()
    config = load_config(options.model)
    vocab_size = vocabulary(config, options.model)
    tokenizer = load_tokenizer(options.model)
    content: dict[str, Any] = {
        "kind": options.kind,
        "text_sha256": hashlib.sha256(raw).hexdigest(),
        "context": context(config, options.model),
        "tokenizer": type(tokenizer).__name__ if tokenizer else None,
    }

    def ids(part: str, special: bool = True) -> list[int]:
        if tokenizer is None:
            return random_ids(vocab_size, part)
        try:
            found = tokenizer(part, add_special_tokens=special).input_ids
        except Exception as error:  # whatever its many tokenizer classes raise
            raise UserError(f"{options.model}: its tokenizer fails on {path} ({first_line(error)})") from None
        if special and not found:
            raise UserError(
                f"{options.model}: its tokenizer makes no token of {part!r:.60} in {path}; change that text"
            )
        if beyond := [token for token in found if not 0 <= token < vocab_size]:
            raise UserError(
                f"{options.model}: its tokenizer makes token {beyond[0]}, and the model has {vocab_size}; an "
                "engine would read what is not there. Download it again"
            )
        return found

    if options.kind == "prompts":
        prompts = [line.strip() for line in text.split("\n") if line.strip()]
        content["prompts"] = [{"text": prompt, "ids": ids(prompt)} for prompt in prompts]
    else:
        content |= {"bytes": len(raw), "words": len(text.split()), "ids": ids(text)}
    if options.kind == "evaluation":
        first = getattr(tokenizer, "bos_token_id", None)
        prefix = first if first is not None else getattr(tokenizer, "eos_token_id", None)
        if prefix is not None and not 0 <= prefix < vocab_size:
            print(
                f"note: the token before documents, {prefix}, is beyond the vocabulary: there is none", file=sys.stderr
            )
            prefix = None
        parts, wikitext = documents.split(parts_of(options.text, text))
        content |= {
            "bos_id": first if first is not None and content["ids"][0] == first else None,  # where it adds one
            "prefix_id": prefix,
            "detokenizer": "wikitext" if wikitext else None,
            "documents": [
                {
                    "ids": ids(documents.detokenize(part) if wikitext else part, special=False),
                    "words": documents.words(part),
                    "bytes": len(part.encode()),
                }
                for part in parts
            ],
        }
    publish_json(options.dst, content)


if __name__ == "__main__":
    run(main)
