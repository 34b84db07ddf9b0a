"""The one way to a model's tokenizer: tokenizer.json as the library `tokenizers` reads it, within limits.

transformers makes a tokenizer by the class that tokenizer_config.json names, which may replace the pre-tokenizer, the
normalizer or added tokens of tokenizer.json. Here tokenizer.json decides.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from quantmill.common import bounded_json, limited, special_tokens
from quantmill.common.model_config import of_text
from quantmill.common.program import UserError, first_line

FILE = "tokenizer.json"
BYTE_LEVEL = ("vocab.json", "merges.txt")  # GPT-2's files, from before there was tokenizer.json
MAX_BYTES = 64 * 2**20  # of the file; those with 262,144 tokens and their merges take 33 MB
# Limits of reading the file and of one text. Real ones take 0.6 GB, 200 bytes for a byte of the text, and 1.5 s for
# a megabyte of it
MEGABYTES, BYTES_A_BYTE = 1536, 400
SECONDS, SECONDS_A_MEGABYTE = 30, 15
BYTES_A_TOKEN, MAX_CHARACTERS_A_TOKEN = 16, 4096  # a token has 4 bytes; the longest known, of blanks, has 1,024
MAX_TOKENS_A_BYTE, MAX_TOKENS = (
    16,
    1024,
)  # a byte is a token at most, and a letter that is taken apart is 11 times as long


def limits(what: object, size: int = 0) -> AbstractContextManager[None]:
    """The limits of what a tokenizer does with a text of `size` bytes; `what` begins the error."""
    megabytes = size / 2**20
    return limited.step(
        str(what),
        megabytes=MEGABYTES + int(BYTES_A_BYTE * megabytes),
        seconds=SECONDS + int(SECONDS_A_MEGABYTE * megabytes),
    )


def load(folder: Path) -> Tokenizer:
    """A folder's tokenizer, which a child process was able to read before. Raises `UserError` where it was not.

    It neither pads nor truncates, whatever the file says: engines get all ids of a text, and no others.
    """
    limited.call(lambda: bool(read(folder)))
    return read(folder)


def read(folder: Path) -> Tokenizer:
    """`load` without the trial, for a process that is a child already (`limited.call`)."""
    path = folder / FILE
    try:
        if path.is_file():
            if path.stat().st_size > MAX_BYTES:
                raise UserError(f"{path}: is larger than {MAX_BYTES >> 20} MiB, and no tokenizer is; download it again")
            with limits(path):
                found = Tokenizer.from_file(str(path))
        else:
            path = folder / BYTE_LEVEL[0]
            with limits(path):
                found = Tokenizer(models.BPE.from_file(*(str(folder / name) for name in BYTE_LEVEL)))
                found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    except UserError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: no tokenizer ({first_line(error)}); download it again") from None
    if getattr(found.model, "dropout", None):
        raise UserError(f"{path}: model.dropout draws other ids for the same text each time; set it to null")
    found.no_padding()
    found.no_truncation()
    return found


def encode(tokenizer: Tokenizer, texts: Sequence[tuple[str, bool]], name: object) -> list[list[int]]:
    """The ids of texts, each with or without special tokens. Run it in a child (`limited.call`).

    `name` is what the texts are called. Raises `UserError` where a text becomes more ids than any tokenizer makes.
    """
    found = []
    with limits(name, sum(len(text.encode()) for text, _ in texts)):
        for text, special in texts:
            ids = tokenizer.encode(text, add_special_tokens=special).ids
            size = len(text.encode())
            if len(ids) > MAX_TOKENS_A_BYTE * size + MAX_TOKENS:
                raise UserError(f"{name}: makes {len(ids):,} tokens of {size:,} bytes; no real tokenizer does")
            found.append(ids)
    return found


def decode(tokenizer: Tokenizer, ids: Sequence[int], name: object, special: bool = False) -> str:
    """The text of ids, with or without special tokens. Run it in a child. `name` begins an error."""
    with limits(name, BYTES_A_TOKEN * len(ids)):
        text = tokenizer.decode(list(ids), skip_special_tokens=not special)
    if len(text) > MAX_CHARACTERS_A_TOKEN * len(ids) + MAX_TOKENS:
        raise UserError(f"{name}: makes {len(text):,} characters of {len(ids):,} tokens; no real tokenizer does")
    return text


def before(tokenizer: Tokenizer, text: str, name: object) -> list[int]:
    """The tokens that a tokenizer puts before a text, such as a beginning of sequence. Run it in a child."""
    beginning = text[:200]
    plain, special = encode(tokenizer, [(beginning, False), (beginning, True)], name)
    places = (place for place in range(len(special)) if plain and special[place : place + len(plain)] == plain)
    return special[: next(places, 0)]


def follow(found: Any, folder: Path) -> Any:
    """Let a tokenizer of transformers make the ids that tokenizer.json says; returns it.

    Raises `UserError` where its class does not use the file at all.
    """
    if not (folder / FILE).is_file():
        return found
    if not isinstance(getattr(found, "_tokenizer", None), Tokenizer):
        raise UserError(
            f"{folder}: tokenizer_class {type(found).__name__} does not read {FILE}; take it out of "
            "tokenizer_config.json"
        )
    found._tokenizer = load(folder)
    for role, token in dict(found.special_tokens_map).items():
        if isinstance(token, str) and found._tokenizer.token_to_id(token) is None:  # a class has names of its own
            setattr(found, role, None)
    if not (folder / "tokenizer_config.json").is_file():  # nothing but config.json names the ends of a sequence
        config = of_text(bounded_json.loads((folder / "config.json").read_bytes()))
        for role in ("bos", "eos"):
            for number in special_tokens.select(config.get(f"{role}_token_id"), config.get("vocab_size"))[:1]:
                setattr(found, f"{role}_token", found._tokenizer.id_to_token(number))
    return found


def for_transformers(folder: Path) -> Any:
    """A folder's tokenizer as transformers' own programs want it, with tokenizer.json's ids (`follow`).

    Raises what transformers raises.
    """
    import transformers  # not every environment has it

    return follow(transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False), folder)
