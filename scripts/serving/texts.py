"""Prompts as text, for servers that take no ids, by the artifact's own tokenizer."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer

from common.program import UserError, first_line

TRIES = 5  # tokens that a text may lose or get


class Texts:
    """An artifact's tokenizer. `reread`: prompts that a server reads as other ids, as many as were meant."""

    def __init__(self, artifact: Path) -> None:
        """Raises `UserError` where the artifact has no tokenizer.json that can be read."""
        path = artifact / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path} is missing: this server takes text, and prompts cannot be written without it")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{path}: no tokenizer ({first_line(error)}); download it again") from None
        self.reread: set[tuple[int, ...]] = set()

    def encode(self, text: str) -> list[int]:
        """The ids as which a server reads a text: with the special tokens that the tokenizer adds."""
        return self.tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Ids as text, without special tokens."""
        return self.tokenizer.decode(list(ids))

    def text(self, ids: Sequence[int]) -> str:
        """The text that is read as these ids; special tokens at its beginning are the server's affair.

        A piece from the middle of a text may be read otherwise: with a beginning of sequence before it, or words that
        were cut put together anew. It then loses a few tokens in front, or gets a few behind, until it is as long as it
        was. Raises `UserError` where that fails.
        """
        for fewer, more in product(range(TRIES), range(TRIES)):
            text = self.decode([*ids[fewer:], *ids[1 : 1 + more]])
            read = self.encode(text)
            if len(read) == len(ids):
                if read != list(ids):
                    self.reread.add(tuple(ids))
                return text
        raise UserError(
            f"this server takes text alone, and no text is read as the {len(ids)} tokens of the prompt that begins "
            f"with {self.decode(ids)[:40]!r}"
        )
