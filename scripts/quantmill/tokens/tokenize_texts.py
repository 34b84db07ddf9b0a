"""Tokenize a text once with the model's tokenizer; all engines get these ids and never the text.

    python scripts/quantmill tokens.tokenize_texts MODEL TEXT DST --as prompts|document|evaluation

`prompts` has one prompt per line (empty lines are skipped), `document` one text. `evaluation` also has the text's
documents (scripts/quantmill/tokens/wikitext.py), without special tokens, for the protocol that scores documents. A
leading byte order mark is dropped, and line ends become LF.

The ids are those of tokenizer.json. If transformers makes other ids, or other files of the model contradict the first
token, `tokenizer_differs` records it in words. BOS is present only if tokenizer.json adds it. The tokenizer runs in a
child process, within limits of memory and time. Random weights without a tokenizer get random ids, one for every four
bytes of the text, which is about the rate of English with a vocabulary of 32,000.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
SHORTEST = 32  # tokens of a context; all language models have more
DECODED = 10_000  # tokens that are decoded as a trial
ROLES = ("bos", "eos")
Texts = Sequence[tuple[str, bool]]  # each with or without special tokens


def check_files(model: Path) -> bool:
    """Return whether the model has a tokenizer; random weights may have none.

    Raises `UserError` for a tokenizer whose ids cannot be checked.
    """
    if manifest.read(model)["source"].get("tokenizer") is False:
        return False
    if (model / tokenizer.FILE).exists() or all((model / name).exists() for name in tokenizer.BYTE_LEVEL):
        return True
    if (model / "tokenizer.model").exists():
        raise UserError(
            f"{model}: holds tokenizer.model and no {tokenizer.FILE}, so its ids cannot be checked; put its "
            f"publisher's {tokenizer.FILE} there"
        )
    raise UserError(f"{model}: holds no tokenizer ({tokenizer.FILE}); copy it to the weights")


@contextmanager
def refuse(words: str) -> Iterator[None]:
    """Convert an error of a library's many tokenizer and config classes, which raise anything, to a `UserError`."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{words} ({first_line(error)})") from None


def read_ids(model: Path, texts: Texts, path: Path) -> dict[str, Any]:
    """Tokenize texts; to be called in a child process (`limited.call`).

    Returns `ids`, a list for each text; `before`, the tokens that the tokenizer puts before the first text; `class`, of
    transformers; `bos` and `eos`, its special tokens; `differs`, the difference of transformers' ids, in words.
    """
    own = tokenizer.read(model)
    name = model / tokenizer.FILE if (model / tokenizer.FILE).exists() else model / tokenizer.BYTE_LEVEL[0]
    fails = f"{model}: its tokenizer fails on {path}"
    with refuse(fails):
        ids = tokenizer.encode(own, texts, f"{name} on {path}")
        put = tokenizer.before(own, texts[0][0], f"{name} on {path}")
        tokenizer.decode(own, ids[0][:DECODED], f"{name} on tokens")  # the page and servers decode tokens
    size = sum(len(text.encode()) for text, _ in texts)
    with tokenizer.limits(f"{model}: the tokenizer that transformers makes", size):
        theirs = load_class(model)
        with refuse(fails):
            others = [theirs(text, add_special_tokens=special).input_ids for text, special in texts]
            named = {each: getattr(theirs, f"{each}_token") for each in ROLES}
            known = {each: own.token_to_id(token) if token else None for each, token in named.items()}
            roles = {
                each: getattr(theirs, f"{each}_token_id") if token is None else token for each, token in known.items()
            }
    kind, differs = type(theirs).__name__, None
    if not (model / tokenizer.FILE).exists():
        ids, put = others, prove_byte_level(model, ids, others, texts, kind)
    elif others != ids:
        differs = describe_difference(ids, others, kind)
    else:
        differs = contradiction(model, put, ids[0], roles)
    return {"ids": ids, "before": put, "class": kind, "differs": differs, **roles}


def load_class(model: Path) -> transformers.PreTrainedTokenizerBase:
    """Load a model's tokenizer with transformers. Raises `UserError` if it cannot."""
    transformers.logging.set_verbosity_error()  # no warning for a document longer than the context
    with refuse(f"{model}: transformers cannot read its tokenizer"):
        found = AutoTokenizer.from_pretrained(model)
    if not isinstance(found, transformers.PreTrainedTokenizerBase):
        raise UserError(f"{model}: tokenizer_class {type(found).__name__} is not a tokenizer; download it again")
    return found


def describe_difference(ids: list[list[int]], others: list[list[int]], kind: str) -> str:
    """Describe the difference of transformers' ids, in words."""
    number = next(number for number, pair in enumerate(zip(ids, others, strict=True)) if pair[0] != pair[1])
    mine, theirs = ids[number], others[number]
    place = next((each for each, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(mine), len(theirs)) if place is None else place
    return (
        f"transformers {transformers.__version__} ({kind}) makes {len(theirs):,} tokens of a text, {tokenizer.FILE} "
        f"{len(mine):,}; they differ from token {place} on; these are {tokenizer.FILE}'s"
    )


def contradiction(model: Path, put: list[int], ids: list[int], roles: Mapping[str, int | None]) -> str | None:
    """Describe a BOS or EOS token on which tokenizer_config.json and tokenizer.json differ; None if they agree."""
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
                f"tokenizer_config.json says add_{role}_token: {json.dumps(wanted)}, but {tokenizer.FILE} adds "
                f"{'none' if wanted else 'one'}; these are {tokenizer.FILE}'s tokens"
            )
    return None


def prove_byte_level(model: Path, ids: list[list[int]], others: list[list[int]], texts: Texts, kind: str) -> list[int]:
    """Check that GPT-2's reading of vocab.json and merges.txt gives the ids of transformers' class.

    Returns the tokens before a text. Raises `UserError` if the ids differ.
    """
    put = others[0][: max(0, len(others[0]) - len(ids[0]))]
    for mine, theirs, (_, special) in zip(ids, others, texts, strict=True):
        if theirs != ((put if special else []) + mine):
            raise UserError(
                f"{model}: holds no {tokenizer.FILE}, and {kind} reads {' and '.join(tokenizer.BYTE_LEVEL)} in another "
                f"way than GPT-2; put its publisher's {tokenizer.FILE} there"
            )
    return put


def load_config(model: Path) -> transformers.PretrainedConfig:
    """Load the config of the language model, with transformers' common names."""
    with refuse(f"{model}: transformers cannot read its config.json"):
        return transformers.AutoConfig.from_pretrained(model).get_text_config()


def context(config: transformers.PretrainedConfig, model: Path) -> int | None:
    """Return the tokens of the model's context, or None if its config has none."""
    tokens = getattr(config, "max_position_embeddings", None)
    if tokens is not None and (type(tokens) is not int or tokens < SHORTEST):
        raise UserError(
            f"{model}: max_position_embeddings is {tokens!r:.60}, not {SHORTEST} or more; download it again"
        )
    return tokens


def vocabulary(config: transformers.PretrainedConfig, model: Path) -> int:
    """Return the size of the model's vocabulary. Raises `UserError` if its config has none."""
    size = getattr(config, "vocab_size", None)
    if type(size) is not int or not 0 < size < 2**31:
        raise UserError(f"{model}: vocab_size is {size!r:.60}, not a number of tokens; download it again")
    return size


def random_ids(vocab_size: int, text: str) -> list[int]:
    """Return ids for a model without a tokenizer, which depend on the vocabulary's size and the text alone."""
    raw = text.encode()
    generator = np.random.default_rng([vocab_size, *hashlib.sha256(raw).digest()])
    return generator.integers(vocab_size, size=max(1, round(len(raw) / BYTES_A_TOKEN))).tolist()


def parts_of(path: Path, text: str) -> list[str]:
    """Return the rows of the data set in a folder of fetch.text, or the text of a file."""
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
    """Raise `UserError` for a text without tokens, or with a token beyond the vocabulary."""
    for (part, special), ids in zip(texts, found, strict=True):
        if special and not ids:
            raise UserError(f"{model}: its tokenizer makes no token of {part!r:.60} in {path}; change that text")
        if beyond := [token for token in ids if not 0 <= token < vocab_size]:
            raise UserError(
                f"{model}: its tokenizer makes token {beyond[0]}, but the model has {vocab_size}; download it again"
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
        print(f"note: the token before documents, {prefix}, is beyond the vocabulary and left out", file=sys.stderr)
        prefix = None
    return first, prefix
