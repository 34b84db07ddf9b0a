"""What a GGUF artifact's file says of itself."""

from collections import Counter
from pathlib import Path

from checkpoint import gguf_file
from common.program import UserError

MODEL = "model.gguf"
EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"


def first(artifact: Path) -> Path:
    """The file of an artifact, the first of several. Raises `UserError` where there is none."""
    found = sorted(artifact.glob("*.gguf"))
    if not found:
        raise UserError(f"{artifact}: holds no .gguf file; build it again")
    return found[0]


def types(path: Path) -> dict[str, int]:
    """How many of a file's tensors are stored as each type, the most frequent first."""
    return dict(Counter(record.type for record in gguf_file.read_all(path).tensors.values()).most_common())


def bytes_per_token(path: Path) -> int:
    """Bytes of weights that one decoded token reads: one row of embeddings that are not the head too, and of experts
    those that are used."""
    content = gguf_file.read_all(path)
    architecture = content.metadata.get("general.architecture")
    used = content.metadata.get(f"{architecture}.expert_used_count", 0)
    total = 0
    for name, record in content.tensors.items():
        nbytes = record.nbytes
        if name == EMBEDDINGS and HEAD in content.tensors:
            nbytes //= record.shape[0]
        elif "_exps." in name and used:
            nbytes = nbytes * used // record.shape[0]
        total += nbytes
    return total
