"""Tokenise a text once, with the model's own tokenizer; every engine then gets these ids and never the text.

    python scripts/quantmill tokens.tokenize_texts MODEL TEXT DST --as prompts|document|evaluation

`prompts` is one prompt a line (empty lines are skipped), `document` one text; `evaluation` also has its documents one
by one (scripts/quantmill/tokens/wikitext.py), without special tokens, for the protocol that scores those. A byte order
mark at the beginning is dropped, and lines end in LF, whatever ended them.

The ids are those of tokenizer.json. Where transformers makes others of the same text, or other files of the model say
so of the first token, `tokenizer_differs` records that in words. A beginning-of-sequence token is there only if
tokenizer.json puts it there. The tokenizer runs in a child process, within limits of memory and time. Random weights
that come without a tokenizer get random ids, one for every four bytes of the text, which is about what a vocabulary of
32,000 makes of English.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers import AutoTokenizer

from quantmill.checkpoint import shards
from quantmill.common import bounded_json, limited, manifest, remote_code, special_tokens, tokenizer
from quantmill.common.model_config import of_text
from quantmill.common.program import UserError, first_line, parser
from quantmill.tokens import plain_text
from quantmill.tokens import wikitext as documents
from quantmill.tokens.files import Document, Prompt, Tokens

BYTES_A_TOKEN = 4
SHORTEST = 32  # tokens of a context; no language model has fewer
DECODED = 10_000  # tokens
ROLES = ("bos", "eos")
Texts = Sequence[tuple[str, bool]]  # each with or without special tokens


def check_files(model: Path) -> bool:
    """Whether the model has a tokenizer; random weights may come without one.

    Raises `UserError` where nothing here proves its ids.
    """
    if manifest.read(model)["source"].get("tokenizer") is False:
        return False
    if (model / tokenizer.FILE).exists() or all((model / name).exists() for name in tokenizer.BYTE_LEVEL):
        return True
    if (model / "tokenizer.model").exists():
        raise UserError(
            f"{model}: holds tokenizer.model and no {tokenizer.FILE}, and nothing here can prove the ids of that; put "
            f"its publisher's {tokenizer.FILE} beside it"
        )
    raise UserError(f"{model}: holds no tokenizer ({tokenizer.FILE}); copy it beside the weights")


def read_ids(model: Path, texts: Texts, path: Path) -> dict[str, Any]:
    """The ids of texts, and what is known of the tokenizer. In a child process (`limited.call`).

    Returns `ids`, one list for each text; `before`, the tokens that the tokenizer puts before the first text; `class`,
    of transformers; `bos` and `eos`, its special tokens; `differs`, how transformers' ids differ, in words.
    """
    own = tokenizer.read(model)
    name = model / tokenizer.FILE if (model / tokenizer.FILE).exists() else model / tokenizer.BYTE_LEVEL[0]
    try:
        ids = tokenizer.encode(own, texts, f"{name} on {path}")
        put = tokenizer.before(own, texts[0][0], f"{name} on {path}")
        tokenizer.decode(own, ids[0][:DECODED], f"{name} on tokens")  # the page and servers want texts of tokens
    except UserError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{model}: its tokenizer fails on {path} ({first_line(error)})") from None
    size = sum(len(text.encode()) for text, _ in texts)
    with tokenizer.limits(f"{model}: the tokenizer that transformers makes", size):
        theirs = load_class(model)
        try:
            others = [theirs(text, add_special_tokens=special).input_ids for text, special in texts]
            named = {each: getattr(theirs, f"{each}_token") for each in ROLES}
            known = {each: own.token_to_id(token) if token else None for each, token in named.items()}
            roles = {
                each: getattr(theirs, f"{each}_token_id") if token is None else token for each, token in known.items()
            }
        except MemoryError:
            raise
        except Exception as error:  # whatever its many tokenizer classes raise
            raise UserError(f"{model}: its tokenizer fails on {path} ({first_line(error)})") from None
    kind, differs = type(theirs).__name__, None
    if not (model / tokenizer.FILE).exists():
        ids, put = others, prove_byte_level(model, ids, others, texts, kind)
    elif others != ids:
        differs = describe_difference(ids, others, kind)
    else:
        differs = contradiction(model, put, ids[0], roles)
    return {"ids": ids, "before": put, "class": kind, "differs": differs, **roles}


def load_class(model: Path) -> transformers.PreTrainedTokenizerBase:
    """What transformers makes of a model's files. Raises `UserError` where that is no tokenizer."""
    transformers.logging.set_verbosity_error()  # or a document longer than the context draws a warning
    try:
        found = AutoTokenizer.from_pretrained(model)
    except MemoryError:
        raise
    except Exception as error:  # whatever its many tokenizer classes raise
        raise UserError(f"{model}: transformers cannot read its tokenizer ({first_line(error)})") from None
    if not isinstance(found, transformers.PreTrainedTokenizerBase):
        raise UserError(f"{model}: tokenizer_class {type(found).__name__} is no tokenizer; download it again")
    return found


def describe_difference(ids: list[list[int]], others: list[list[int]], kind: str) -> str:
    """How transformers' ids of the texts differ, in words."""
    number = next(number for number, pair in enumerate(zip(ids, others, strict=True)) if pair[0] != pair[1])
    mine, theirs = ids[number], others[number]
    place = next((each for each, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(mine), len(theirs)) if place is None else place
    return (
        f"transformers {transformers.__version__} ({kind}) reads a text as {len(theirs):,} tokens where "
        f"{tokenizer.FILE} makes {len(mine):,}, other ones from token {place} on; these are {tokenizer.FILE}'s"
    )


def contradiction(model: Path, put: list[int], ids: list[int], roles: Mapping[str, int | None]) -> str | None:
    """That tokenizer_config.json adds a token at an end of a text, or none, and tokenizer.json does otherwise."""
    path = model / "tokenizer_config.json"
    try:
        said = bounded_json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path}: {error}; download it again") from None
    there = {"bos": bool(put), "eos": bool(ids) and ids[-1] == roles["eos"]}
    for role in ROLES:
        wanted = said.get(f"add_{role}_token")
        if type(wanted) is bool and wanted is not there[role]:
            return (
                f"tokenizer_config.json says add_{role}_token: {json.dumps(wanted)}, and {tokenizer.FILE} adds "
                f"{'none' if wanted else 'one'}; these are {tokenizer.FILE}'s tokens"
            )
    return None


def prove_byte_level(model: Path, ids: list[list[int]], others: list[list[int]], texts: Texts, kind: str) -> list[int]:
    """The tokens before a text, where GPT-2's reading of vocab.json and merges.txt gives the ids that transformers'
    class makes beside them. Raises `UserError` where it does not."""
    put = others[0][: max(0, len(others[0]) - len(ids[0]))]
    for mine, theirs, (_, special) in zip(ids, others, texts, strict=True):
        if theirs != ((put if special else []) + mine):
            raise UserError(
                f"{model}: holds no {tokenizer.FILE}, and {kind} reads {' and '.join(tokenizer.BYTE_LEVEL)} as other "
                f"tokens than GPT-2 would; put the {tokenizer.FILE} that its publisher made beside them"
            )
    return put


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
    """The rows of the data set that a folder of fetch.text's came from; of a file, the text."""
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
    arguments.add_argument("text", type=Path, help="a text, or a folder that fetch.text wrote")
    arguments.add_argument("dst", type=Path, help="JSON file to write")
    arguments.add_argument("--as", dest="kind", choices=["prompts", "document", "evaluation"], required=True)
    options = arguments.parse_args()

    path = options.text / "text.txt" if options.text.is_dir() else options.text
    try:
        text = plain_text.read(path)
    except plain_text.NotPlain as error:
        raise UserError(f"{path}: {error}") from None
    raw = text.encode()
    remote_code.forbid()
    config = load_config(options.model)
    vocab_size = vocabulary(config, options.model)
    tokenizes = check_files(options.model)
    found = Tokens(options.kind, hashlib.sha256(raw).hexdigest(), context(config, options.model))
    texts: list[tuple[str, bool]] = [(text, True)]
    parts: list[str] = []
    wikitext = False
    if options.kind == "prompts":
        texts = [(line.strip(), True) for line in text.split("\n") if line.strip()]
    elif options.kind == "evaluation":
        parts, wikitext = documents.split(parts_of(options.text, text))
        texts += [(documents.detokenize(part) if wikitext else part, False) for part in parts]
    if tokenizes:
        read = limited.call(lambda: read_ids(options.model, texts, path))
        check_ids(options.model, path, vocab_size, texts, read["ids"])
        found = replace(found, tokenizer=read["class"], tokenizer_differs=read["differs"])
        if read["differs"]:
            print(f"note: {read['differs']}", file=sys.stderr)
    else:
        read = {"ids": [random_ids(vocab_size, part) for part, _ in texts], "before": [], "bos": None, "eos": None}

    whole, *others = read["ids"]
    if options.kind == "prompts":
        prompts = [Prompt(part, ids) for (part, _), ids in zip(texts, read["ids"], strict=True)]
        found = replace(found, prompts=prompts)
    else:
        found = replace(found, bytes=len(raw), words=len(text.split()), ids=whole)
    if options.kind == "evaluation":
        said = of_text(shards.read_config(options.model / "config.json"))
        begin, prefix = firsts(read, said, vocab_size, tokenizes)
        found = replace(
            found,
            bos_id=begin,
            prefix_id=prefix,
            detokenizer="wikitext" if wikitext else None,
            documents=[
                Document(ids, documents.words(part), len(part.encode()))
                for part, ids in zip(parts, others, strict=True)
            ],
        )
    found.write(options.dst)


def check_ids(model: Path, path: Path, vocab_size: int, texts: Texts, found: list[list[int]]) -> None:
    """Raises `UserError` where a text has no tokens, or one that the model does not have."""
    for (part, special), ids in zip(texts, found, strict=True):
        if special and not ids:
            raise UserError(f"{model}: its tokenizer makes no token of {part!r:.60} in {path}; change that text")
        if beyond := [token for token in ids if not 0 <= token < vocab_size]:
            raise UserError(
                f"{model}: its tokenizer makes token {beyond[0]}, and the model has {vocab_size}; an "
                "engine would read what is not there. Download it again"
            )


def firsts(
    read: Mapping[str, Any], said: Mapping[str, Any], vocab_size: int, tokenizes: bool
) -> tuple[int | None, int | None]:
    """Return the token that the tokenizer puts before the evaluation text, and the one before each document.

    The second is the same token, else the model's beginning or end of sequence. Both are None for random ids.
    """
    if not tokenizes:
        return None, None
    named = [special_tokens.select(said.get(f"{role}_token_id"), vocab_size) for role in ROLES]
    begins, ends = [read["bos"], *named[0]], [read["eos"], *named[1]]
    whole = read["ids"][0]
    first = whole[0] if read["before"] or whole[0] in begins else None
    candidates = [first, read["bos"], read["eos"], *begins, *ends]
    prefix = next((token for token in candidates if token is not None), None)
    if prefix is not None and not 0 <= prefix < vocab_size:
        print(f"note: the token before documents, {prefix}, is beyond the vocabulary: there is none", file=sys.stderr)
        prefix = None
    return first, prefix
