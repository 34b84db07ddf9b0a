"""Read a model's tokenizer.json with the library `tokenizers`, within limits.

transformers builds a tokenizer by the class that tokenizer_config.json names. That class may replace the
pre-tokenizer, the normalizer or added tokens of tokenizer.json. Here tokenizer.json decides.
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
BYTE_LEVEL = ("vocab.json", "merges.txt")  # GPT-2's files, which are older than tokenizer.json
MAX_BYTES = 64 * 2**20  # of the file; one with 262,144 tokens and their merges has 33 MB
# Limits of reading the file, and of a text by its size. Real tokenizers take 0.6 GB, and 200 bytes per byte and 1.5 s
# per megabyte of text.
MEGABYTES, BYTES_A_BYTE = 1536, 400
SECONDS, SECONDS_A_MEGABYTE = 30, 15
BYTES_A_TOKEN, MAX_CHARACTERS_A_TOKEN = 16, 4096  # a token has about 4 bytes; the longest known, of blanks, has 1,024
MAX_TOKENS_A_BYTE, MAX_TOKENS = 16, 1024  # usually below 1 per byte; a decomposed letter is 11 times as long


def limits(what: object, size: int = 0) -> AbstractContextManager[None]:
    """Return the limits for tokenizing a text of `size` bytes; `what` begins the error."""
    megabytes = size / 2**20
    return limited.step(
        str(what),
        megabytes=MEGABYTES + int(BYTES_A_BYTE * megabytes),
        seconds=SECONDS + int(SECONDS_A_MEGABYTE * megabytes),
    )


def load(folder: Path) -> Tokenizer:
    """Load a folder's tokenizer, after a child process could read it. Raises `UserError` if it could not.

    It neither pads nor truncates, whatever the file says: engines get exactly the ids of a text.
    """
    limited.call(lambda: bool(read(folder)))
    return read(folder)


def read(folder: Path) -> Tokenizer:
    """Load a folder's tokenizer without the trial of `load`, in a process that is a child of `limited.call`."""
    path = folder / FILE
    try:
        if path.is_file():
            if path.stat().st_size > MAX_BYTES:
                raise UserError(f"{path}: is larger than {MAX_BYTES >> 20} MiB; download it again")
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
        raise UserError(f"{path}: is not a tokenizer ({first_line(error)}); download it again") from None
    if getattr(found.model, "dropout", None):
        raise UserError(f"{path}: model.dropout makes ids random; set it to null")
    found.no_padding()
    found.no_truncation()
    return found


def encode(tokenizer: Tokenizer, texts: Sequence[tuple[str, bool]], name: object) -> list[list[int]]:
    """Tokenize texts, each with or without special tokens; to be called in a child (`limited.call`).

    `name` begins an error. Raises `UserError` if a text becomes more ids than any real tokenizer makes.
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
    """Decode ids, with or without special tokens; to be called in a child. `name` begins an error."""
    with limits(name, BYTES_A_TOKEN * len(ids)):
        text = tokenizer.decode(list(ids), skip_special_tokens=not special)
    if len(text) > MAX_CHARACTERS_A_TOKEN * len(ids) + MAX_TOKENS:
        raise UserError(f"{name}: makes {len(text):,} characters of {len(ids):,} tokens; no real tokenizer does")
    return text


def before(tokenizer: Tokenizer, text: str, name: object) -> list[int]:
    """Return the tokens that a tokenizer puts before a text, such as BOS; to be called in a child."""
    beginning = text[:200]
    plain, special = encode(tokenizer, [(beginning, False), (beginning, True)], name)
    places = (place for place in range(len(special)) if plain and special[place : place + len(plain)] == plain)
    return special[: next(places, 0)]


def follow(found: Any, folder: Path) -> Any:
    """Make a transformers tokenizer produce the ids of tokenizer.json; return it.

    Raises `UserError` if its class does not use the file.
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
        if (
            isinstance(token, str) and found._tokenizer.token_to_id(token) is None
        ):  # a name of the class, not of the file
            setattr(found, role, None)
    if not (folder / "tokenizer_config.json").is_file():  # only config.json names BOS and EOS
        config = of_text(bounded_json.loads((folder / "config.json").read_bytes()))
        for role in ("bos", "eos"):
            for number in special_tokens.select(config.get(f"{role}_token_id"), config.get("vocab_size"))[:1]:
                setattr(found, f"{role}_token", found._tokenizer.id_to_token(number))
    return found


def for_transformers(folder: Path) -> Any:
    """Load a folder's tokenizer for transformers, with the ids of tokenizer.json (`follow`)."""
    import transformers  # not every environment has it

    return follow(transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False), folder)
