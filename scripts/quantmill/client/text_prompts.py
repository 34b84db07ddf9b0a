"""Prompts as text, for servers that take no ids, by the artifact's own tokenizer."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from quantmill.common import limited, tokenizer
from quantmill.common.program import UserError

TRIES = 5  # tokens that a text may lose or get


class Texts:
    """An artifact's tokenizer. `reread`: prompts that a server reads as other ids, as many as were meant."""

    def __init__(self, artifact: Path) -> None:
        """Raises `UserError` where the artifact has no tokenizer.json that can be read."""
        self.file = artifact / tokenizer.FILE
        if not self.file.is_file():
            raise UserError(f"{self.file} is missing: this server takes text, and prompts cannot be written without it")
        self.tokenizer = tokenizer.load(artifact)
        self.reread: set[tuple[int, ...]] = set()
        self.texts: dict[tuple[int, ...], str] = {}

    def encode(self, text: str) -> list[int]:
        """The ids as which a server reads a text: with the special tokens that the tokenizer adds."""
        return limited.call(lambda: tokenizer.encode(self.tokenizer, [(text, True)], self.file)[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Ids as text, without special tokens."""
        return limited.call(lambda: tokenizer.decode(self.tokenizer, ids, self.file))

    def text(self, ids: Sequence[int]) -> str:
        """The text that is read as these ids; special tokens at its beginning are the server's affair.

        A piece from the middle of a text may be read otherwise: with a beginning of sequence before it, or words that
        were cut put together anew. It then loses a few tokens in front, or gets a few behind, until it is as long as it
        was. Raises `UserError` where that fails.
        """
        key = tuple(ids)
        if key not in self.texts:
            self.texts[key], same = limited.call(lambda: self._find(ids))
            if not same:
                self.reread.add(key)
        return self.texts[key]

    def _find(self, ids: Sequence[int]) -> tuple[str, bool]:
        """The text, and whether it is read as these very ids."""
        for fewer, more in product(range(TRIES), range(TRIES)):
            text = tokenizer.decode(self.tokenizer, [*ids[fewer:], *ids[1 : 1 + more]], self.file)
            (read,) = tokenizer.encode(self.tokenizer, [(text, True)], self.file)
            if len(read) == len(ids):
                return text, read == list(ids)
        begin = tokenizer.decode(self.tokenizer, ids, self.file)[:40]
        raise UserError(
            f"this server takes text alone, and no text is read as the {len(ids)} tokens of the prompt that begins "
            f"with {begin!r}"
        )
