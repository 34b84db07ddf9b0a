"""The parameters of an MLC model: their tensors, their quantization and their order.

From MLC-LLM's python/mlc_llm: model/*/*_loader.py, loader/huggingface_loader.py, quantization/quantization.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError
from quantmill.mlc.quantize import GROUP
from quantmill.mlc.source_config import Shape, SourceConfig

DTYPES = ("F16", "BF16", "F32", "F64")
Shapes = dict[str, tuple[int, ...]]
Stored = dict[str, tuple[tuple[int, ...], str]]  # name -> shape and dtype


@dataclass(frozen=True)
class Layout:
    """The kinds of parameters that a quantization packs into four bits; others, norms and biases stay float16."""

    layers: bool
    embeddings: bool
    head: bool


# MLC-LLM's names. Those that store weights transposed (…_0) or use another arithmetic are missing.
LAYOUTS = {
    "q4f16_1": Layout(layers=True, embeddings=True, head=True),
    "q4f16_2": Layout(layers=True, embeddings=False, head=False),
    "q0f16": Layout(layers=False, embeddings=False, head=False),
}


@dataclass(frozen=True)
class Parameter:
    """A parameter, before it is quantized: tensors one after another along axis 0. `name` is without `.weight`."""

    name: str
    suffix: str
    parts: tuple[Tensor, ...]
    quantized: bool

    def stored(self) -> Stored:
        """Return the tensors that it is stored as."""
        return stored(self.name, self.suffix, total_shape(part.shape for part in self.parts), self.quantized)


def find(source: Checkpoint, config: SourceConfig, layout: Layout) -> list[Parameter]:
    """Return a checkpoint's parameters, in the order in which MLC-LLM writes them.

    Raises `UserError` for a tensor that is missing, has another shape than the config says, is not of a float dtype, or
    has no place in the model.
    """
    tensors = source.tensors()
    found = {}
    for name, suffix, parts, quantized in model_parameters(config, layout):
        found[f"{name}.{suffix}"] = Parameter(
            name, suffix, tuple(_tensor(source, tensors, part, shape) for part, shape in parts.items()), quantized
        )
    used = {part.name: name for name, parameter in found.items() for part in parameter.parts}
    ignored = ("lm_head.weight",) if config.tie_word_embeddings else ()
    for name in tensors:
        if name not in used and name not in ignored and not _is_unused(name):
            raise UserError(
                f"{tensors[name].path}: holds {name}, which MLC's {config.family.model_type} has no place for; "
                "leave mlc out of this model's formats"
            )
    # file by file as in the index (_loading_order); without an index by name, as in the one that MLC-LLM then makes. A
    # fused parameter comes at its first part
    files: dict[str, list[str]] = {}
    for name, file in (source.weight_map or dict.fromkeys(sorted(tensors), "")).items():
        files.setdefault(file, []).append(name)
    order = [name for names in files.values() for name in names]
    unnamed = used.keys() - set(order)
    if unnamed:
        raise UserError(f"{source.index()}: does not name {min(unnamed)}, which the shards hold; download it again")
    return list({used[name]: found[used[name]] for name in order if name in used}.values())


def model_parameters(shape: Shape, layout: Layout) -> Iterator[tuple[str, str, Shapes, bool]]:
    """Yield name, suffix, shapes of the tensors and `quantized` of each parameter, in the model's order."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
    embeddings = (shape.vocab_size, hidden)
    yield "model.embed_tokens", "weight", {"model.embed_tokens.weight": embeddings}, layout.embeddings
    for number in range(shape.num_hidden_layers):
        layer = f"model.layers.{number}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        fused, rows = f"{attention}.{shape.qkv_name}", {"q": queries, "k": keys, "v": keys}
        yield f"{layer}.input_layernorm", "weight", {f"{layer}.input_layernorm.weight": (hidden,)}, False
        weights: Shapes = {f"{attention}.{letter}_proj.weight": (count, hidden) for letter, count in rows.items()}
        yield fused, "weight", weights, layout.layers
        if shape.qkv_bias:
            biases: Shapes = {f"{attention}.{letter}_proj.bias": (count,) for letter, count in rows.items()}
            yield fused, "bias", biases, False
        yield f"{attention}.o_proj", "weight", {f"{attention}.o_proj.weight": (hidden, queries)}, layout.layers
        norm = f"{layer}.post_attention_layernorm"
        yield norm, "weight", {f"{norm}.weight": (hidden,)}, False
        gates: Shapes = {f"{mlp}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        yield f"{mlp}.gate_up_proj", "weight", gates, layout.layers
        yield f"{mlp}.down_proj", "weight", {f"{mlp}.down_proj.weight": (hidden, inner)}, layout.layers
    yield "model.norm", "weight", {"model.norm.weight": (hidden,)}, False
    if not shape.tie_word_embeddings:
        yield "lm_head", "weight", {"lm_head.weight": embeddings}, layout.head


def total_shape(parts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of tensors that are joined along axis 0."""
    first, *others = parts
    return (first[0] + sum(each[0] for each in others), *first[1:])


def stored(name: str, suffix: str, shape: tuple[int, ...], quantized: bool) -> Stored:
    """Return the tensors that a parameter is stored as."""
    if not quantized:
        return {f"{name}.{suffix}": (shape, "float16")}
    rows, inputs = shape
    groups = -(-inputs // GROUP)
    return {
        f"{name}.q_weight": ((rows, groups * GROUP // 8), "uint32"),
        f"{name}.q_scale": ((rows, groups), "float16"),
    }


def _tensor(source: Checkpoint, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise UserError(f"{source.folder}: {name} is missing, which config.json asks for; download it again")
    if tensor.shape != shape:
        raise UserError(f"{tensor.path}: {name} has shape {tensor.shape}, where config.json says {shape}")
    if tensor.dtype not in DTYPES:
        raise UserError(f"{tensor.path}: {name} is {tensor.dtype}, not a plain weight; give the original weights")
    return tensor


def _is_unused(name: str) -> bool:
    return name.endswith(".rotary_emb.inv_freq")


def count_weights(source: Checkpoint, parameters: list[Parameter]) -> int:
    """Count the weights as MLC-LLM does for its bits per weight.

    Its loader counts all weights of a file whenever it reads the file. It keeps the files that the current parameter
    needs, and drops the others when it reads one more. So some files are read, and counted, again.
    """
    sizes: dict[Path, int] = {}
    for name, tensor in source.tensors().items():
        sizes[tensor.path] = sizes.get(tensor.path, 0) + (0 if _is_unused(name) else tensor.numel)
    total = 0
    held: set[Path] = set()
    for parameter in parameters:
        needed = {part.path for part in parameter.parts}
        if needed - held:
            total += sum(sizes[path] for path in needed - held)
            held = needed
    return total
