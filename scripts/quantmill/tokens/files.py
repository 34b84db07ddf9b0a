"""The files artifacts/MODEL/tokens/*.json: a text as ids, written by tokens.tokenize_texts."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from quantmill.common.atomic import write_json


@dataclass(frozen=True)
class Prompt:
    """A line of a text of prompts."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Document:
    """A document of an evaluation text, as ids without special tokens."""

    ids: list[int]
    words: int
    bytes: int


@dataclass(frozen=True)
class Tokens:
    """A text as ids.

    Attributes:
        kind: prompts, document or evaluation.
        text_sha256: of the text.
        context: tokens of the model's context, if its config has it.
        tokenizer: transformers' class of the tokenizer; None for random ids.
        tokenizer_differs: difference of other tokenizers' ids, in words.
        prompts: lines of a text of prompts.
        ids, bytes, words: of another text as a whole.
        bos_id: BOS at the beginning of an evaluation text, if the tokenizer adds it.
        prefix_id: token before each document.
        detokenizer: `wikitext`, if the documents were detokenized.
    """

    kind: str = "document"
    text_sha256: str = ""
    context: int | None = None
    tokenizer: str | None = None
    tokenizer_differs: str | None = None
    prompts: list[Prompt] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    bytes: int = 0
    words: int = 0
    bos_id: int | None = None
    prefix_id: int | None = None
    detokenizer: str | None = None
    documents: list[Document] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Tokens":
        """Read a file of tokens."""
        content = json.loads(path.read_text(encoding="utf-8"))
        prompts = [Prompt(**each) for each in content.pop("prompts", ())]
        documents = [Document(**each) for each in content.pop("documents", ())]
        return cls(**content, prompts=prompts, documents=documents)

    def write(self, path: Path) -> None:
        """Write the file."""
        write_json(path, asdict(self))
