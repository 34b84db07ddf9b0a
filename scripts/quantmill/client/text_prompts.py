"""Prompts as text, for servers that take no ids, made by the artifact's own tokenizer."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from quantmill.common import limited, tokenizer
from quantmill.common.program import UserError

TRIES = 5  # tokens that a text may lose or gain


class Texts:
    """An artifact's tokenizer. `reread`: prompts that a server reads as other ids, of the same number."""

    def __init__(self, artifact: Path) -> None:
        """Load it. Raises `UserError` where the artifact has no readable tokenizer.json."""
        self.file = artifact / tokenizer.FILE
        if not self.file.is_file():
            raise UserError(f"{self.file} is missing: this server takes text, and prompts cannot be written without it")
        self.tokenizer = tokenizer.load(artifact)
        self.reread: set[tuple[int, ...]] = set()
        self.texts: dict[tuple[int, ...], str] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids as which a server reads a text, with the special tokens that the tokenizer adds."""
        return limited.call(lambda: tokenizer.encode(self.tokenizer, [(text, True)], self.file)[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Return ids as text, without special tokens."""
        return limited.call(lambda: tokenizer.decode(self.tokenizer, ids, self.file))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text that is read as these ids; the server adds special tokens at its beginning.

        A piece from the middle of a text may be read differently: with a beginning of sequence before it, or with cut
        words joined again. It then loses a few tokens at the front, or gains a few at the end, until it has its old
        length. Raises `UserError` where that fails.
        """
        key = tuple(ids)
        if key not in self.texts:
            self.texts[key], same = limited.call(lambda: self._find(ids))
            if not same:
                self.reread.add(key)
        return self.texts[key]

    def _find(self, ids: Sequence[int]) -> tuple[str, bool]:
        """Return the text, and whether it is read as exactly these ids."""
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
