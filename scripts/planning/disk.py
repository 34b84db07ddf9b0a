"""How large each artifact will be, from a model's shape, without the files beside its weights (tokenizer, config)."""

from collections.abc import Callable

from planning.shape import Shape

GROUP = 128  # weights with one scale, where the config leaves it to the layers
MLC_LIBRARY = 500_000  # bytes; 0.4 to 1.1 MB were seen
SMALL = 50  # MB of tokenizer, config and the like
POSITIONS_A_BYTE = 1 / 3  # scored positions of a text, at most: the demo's tokenizer makes 0.32, Llama's 0.26


def int4_bytes(shape: Shape, group: int, ordered: bool) -> int:
    """Matrices of the blocks in 4 bits, with a scale of 2 bytes and a zero of half a byte a group; all else in float16.

    `ordered`: an int32 for each input of a matrix, which says its group (GPTQ's g_idx).
    """
    packed = shape.layers * shape.block
    rest = 2 * (shape.parameters - packed)
    return rest + packed // 2 + 5 * packed // (2 * group) + (4 * shape.inputs if ordered else 0)


ARTIFACTS: dict[str, Callable[[Shape, int], int]] = {  # format -> bytes, of a shape and a group's size
    "fp16": lambda shape, group: 2 * shape.parameters,
    "ct2-float32": lambda shape, group: 4 * shape.parameters,
    "ct2-float16": lambda shape, group: 2 * shape.parameters,
    "ct2-int8": lambda shape, group: shape.parameters + 4 * shape.rows,
    "gptq-int4": lambda shape, group: int4_bytes(shape, group, ordered=True),
    "autogptq-int4": lambda shape, group: int4_bytes(shape, group, ordered=True),
    "awq-int4": lambda shape, group: int4_bytes(shape, group, ordered=False),
    "mlc-q4f16_1": lambda shape, group: shape.parameters * 9 // 16 + MLC_LIBRARY,  # groups of 32, embeddings too
}


UNQUANTIZED = ("fp16", "ct2-float16", "ct2-float32")


def artifact_bytes(format: str, shape: Shape, group: int | str = GROUP) -> int | None:
    """Bytes of a format's artifact; None for a format that is not in the table."""
    if format not in ARTIFACTS:
        return None
    return ARTIFACTS[format](shape, GROUP if group == "auto" else int(group))


def artifact_mb(format: str, shape: Shape, group: int | str = GROUP) -> int:
    """MB of a job's artifact, its small files with it. A format that is not in the table counts as fp16."""
    return (artifact_bytes(format, shape, group) or 2 * shape.parameters) // 10**6 + SMALL


def build_mb(format: str, shape: Shape, device: str, gated: bool, group: int | str = GROUP) -> int:
    """MB of a job's artifact, and of what lies beside it while the gate runs: the weights of a quantized one as
    transformers takes them, in float32 or on a GPU in float16."""
    copy = (4 if device == "cpu" else 2) * shape.parameters if gated and format not in UNQUANTIZED else 0
    return artifact_mb(format, shape, group) + copy // 10**6


def logits_bytes(text_bytes: int, vocab: int) -> int:
    """Bytes of the reference's logits over a text, at most: float16, for each position and token of the vocabulary."""
    return int(text_bytes * POSITIONS_A_BYTE) * vocab * 2
