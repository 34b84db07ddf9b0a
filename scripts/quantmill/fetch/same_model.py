"""Check that an artifact is of this model, by its sizes and its vocabulary."""

from collections.abc import Mapping
from pathlib import Path

from quantmill.checkpoint import selection, shards
from quantmill.common.program import UserError

SIZES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size"),
)
MAX_VALUES = 8_000_000
CODE = "auto_map"  # names Python of the artifact's own


def check_config(artifact: Path, source: Path) -> None:
    """Raise `UserError` if two folders' config.json are of models of other sizes, or the artifact's names code."""
    theirs, ours = (shards.read_config(folder / "config.json") for folder in (artifact, source))
    for file in ("config.json", "tokenizer_config.json"):
        path = artifact / file
        if path.is_file() and CODE in shards.read_json(path):
            raise UserError(f"{path}: has an {CODE}, which names Python code; Quantmill does not run it")
    for name in SIZES:
        mine = ours.get(name, ours.get("num_attention_heads") if name == "num_key_value_heads" else None)
        if mine is not None and theirs.get(name, mine) != mine:
            raise UserError(f"{artifact}: is another model: its {name} is {theirs[name]!r}, this model's {mine!r}")


def tokens(folder: Path) -> dict[int, str] | None:
    """Return the tokens of a folder's tokenizer.json by id, added ones included; None if there is no such file. Raises
    `UserError` if its tokens are not texts with numbers."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    content = shards.read_json(path, selection.MAX_BYTES, MAX_VALUES)
    try:
        vocabulary = (content.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, dict):
            found = {number: token for token, number in vocabulary.items()}
        else:  # Unigram: pairs of a token and its score, in the order of ids
            found = {number: token for number, (token, _) in enumerate(vocabulary)}
        found |= {added["id"]: added["content"] for added in content.get("added_tokens") or []}
    except (AttributeError, KeyError, TypeError, ValueError):
        found = {None: None}
    if not all(type(number) is int and isinstance(token, str) for number, token in found.items()):
        raise UserError(f"{path}: its tokens are not texts with numbers; download it again")
    return found


def check_tokens(artifact: Path, theirs: Mapping[int, str], ours: Mapping[int, str]) -> None:
    """Raise `UserError` if an id is another token: this model's ids would mean something else there."""
    for number in sorted({*theirs, *ours}):
        if theirs.get(number) != ours.get(number):
            raise UserError(
                f"{artifact}: has another vocabulary: its token {number} is {theirs.get(number)!r}, "
                f"this model's {ours.get(number)!r}"
            )
