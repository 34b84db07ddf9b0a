"""The files of a GGUF artifact, and facts that its GGUF file gives."""

from collections import Counter
from pathlib import Path

from quantmill.checkpoint import shards
from quantmill.checkpoint.gguf_file import Gguf
from quantmill.common.program import UserError

MODEL = "model.gguf"
CARRIED = ("config.json", "generation_config.json", "tokenizer", "special_tokens", "vocab.json", "merges.txt")
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"
ROWS = "per_layer_token_embd.weight"  # another table of which each token reads one row


def first(artifact: Path) -> Path:
    """Return an artifact's GGUF file, the first of several. Raises `UserError` if there is none."""
    found = sorted(artifact.glob("*.gguf"))
    if not found:
        raise UserError(f"{artifact}: has no .gguf file; build it again")
    return found[0]


def beside(source: Path) -> list[Path]:
    """List the files of a model's folder that belong to its weights: config and tokenizer."""
    return [path for path in shards.find(source).others() if path.name.startswith(CARRIED)]


def types(content: Gguf) -> dict[str, int]:
    """Count the tensors of each type, the most frequent first."""
    return dict(Counter(record.type for record in content.tensors.values()).most_common())


def compute_type(content: Gguf) -> str:
    """Return the type in which llama.cpp multiplies: int8 for quantized weights, else the weights' type."""
    found = {record.type for record in content.tensors.values()}
    return "int8" if found - FLOATS.keys() else next(name for type_, name in FLOATS.items() if type_ in found)


def weight_bytes(content: Gguf) -> int:
    """Return the bytes of all weights."""
    return sum(record.nbytes for record in content.tensors.values())


def bytes_per_token(content: Gguf) -> int:
    """Bytes of weights that one decoded token reads: one row of the embeddings, unless they are also the head; of
    experts, those that are used."""
    architecture = content.metadata.get("general.architecture")
    used = content.metadata.get(f"{architecture}.expert_used_count", 0)
    total = 0  # the file's numbers are checked: it may be a stranger's
    for name, record in content.tensors.items():
        nbytes = record.nbytes
        if name == ROWS or (name == EMBEDDINGS and HEAD in content.tensors):
            nbytes //= max(1, record.shape[0])
        elif "_exps." in name and record.shape and type(used) is int and 0 < used < record.shape[0]:
            nbytes = nbytes * used // record.shape[0]
        total += nbytes
    return total
