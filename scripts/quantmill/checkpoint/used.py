"""The tensors of a checkpoint that its model uses, as fetch.name_tensors found once for all artifacts.

A tensor that the model's class does not take is a buffer that every library computes itself, a multi-token prediction
layer, a part of a tower that reads images or sound, or a sign that config.json belongs to another model. In the last
case nothing is made of it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantmill.checkpoint import reads_more_than_text
from quantmill.checkpoint.tensor import Tensor
from quantmill.common import manifest
from quantmill.common.program import UserError

# rotary embeddings' frequencies and tables, positions, and the value of masked entries
BUFFERS = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|cos_cached|sin_cached|position_ids|masked_bias|embed_positions\.weights)$"
)
MASKS = re.compile(r"att\w*\.(bias|mask|attn_mask|causal_mask|attention_mask)$")  # if their shape is a mask's
NEXT = re.compile(r"(^|\.)mtp\w*\.")  # multi-token prediction layers by their own name
# and those numbered after the model's own, which also have these (DeepSeek, GLM)
NUMBERED = re.compile(r"(?P<layer>(^|\.)layers\.\d+)\.(.*\.)?(eh_proj|enorm|hnorm|shared_head)\.")
LAYER = re.compile(r"(?P<layer>(^|\.)(layers|h|blocks)\.(?P<number>\d+))\.")
ADAPTER = re.compile(r"(^|\.)(lora_\w+|modules_to_save|prompt_encoder|ia3_\w+)\.|^base_model\.model\.")
SCALES = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|\w*scale(_inv)?|\w*absmax|SCB|weight_packed|\w*zero_point|quant_map|trellis)$"
)
EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "F8_E8M0")  # weights in these need scales


@dataclass(frozen=True)
class Used:
    """Names of a checkpoint's tensors: `used` with their shapes; `beside`, which are kept though no text reaches them;
    and `dropped`."""

    used: dict[str, list[int]]
    beside: list[str]
    dropped: list[str]

    def kept(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all tensors that are not dropped."""
        left_out = {*self.dropped}
        return {name: tensor for name, tensor in tensors.items() if name not in left_out}

    def as_source(self) -> dict[str, list[str]]:
        """Return what each artifact's manifest says of it, in `source`; empty if the model uses every tensor."""
        return {name: names for name, names in (("dropped", self.dropped), ("beside", self.beside)) if names}

    def write(self, path: Path) -> None:
        """Write the list as JSON, a tensor a line."""
        path.write_text(json.dumps(asdict(self), indent=0) + "\n", encoding="utf-8")


def read(path: Path, tensors: Mapping[str, Tensor]) -> Used:
    """Read the list of `Used.write`. Raises `UserError` if it belongs to other tensors."""
    found = Used(**json.loads(path.read_text(encoding="utf-8")))
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    listed = found.used.keys() | {*found.beside, *found.dropped}
    if listed != shapes.keys() or any(shapes[name] != shape for name, shape in found.used.items()):
        raise UserError(f"{path}: was made from other weights; delete it and run again")
    return found


def beside(folder: Path) -> set[str]:
    """Return names of tensors in an artifact's folder that are kept though its model does not use them."""
    origin = manifest.read(folder)["source"] if (folder / manifest.NAME).exists() else {}
    return {*origin.get("beside", ())}


def is_buffer(tensor: Tensor) -> bool:
    """Return whether a tensor is a buffer that every library computes itself and older ones stored with the weights."""
    shape = tensor.shape
    square = len(shape) >= 2 and shape[-1] == shape[-2] and all(size == 1 for size in shape[:-2])
    is_mask = square and (len(shape) == 4 or tensor.dtype in ("BOOL", "U8"))
    return bool(BUFFERS.search(tensor.name) or (is_mask and MASKS.search(tensor.name)))


def further_layers(names: Iterable[str]) -> set[str]:
    """Return the names that belong to multi-token prediction layers."""
    names = list(names)
    numbered = {found["layer"] for name in names if (found := NUMBERED.search(name))}
    return {
        name for name in names if NEXT.search(name) or ((layer := LAYER.search(name)) and layer["layer"] in numbered)
    }


def sort(
    place: str, tensors: Mapping[str, Tensor], taken: Iterable[str], ignored: Iterable[str], layers: int, further: bool
) -> Used:
    """Sort a checkpoint's tensors.

    Args:
        place: the checkpoint's name in errors.
        taken: names that the model's class takes; ignored: of the others, those that it expects.
        layers: the config's number of layers.
        further: whether a run of the study uses multi-token prediction layers.

    Raises `UserError` with the first of those that nothing explains.
    """
    taken = set(taken)
    left = [name for name in tensors if name not in taken]
    guessing = further_layers(left)
    beside = {name for name in left if reads_more_than_text(name) and name not in guessing}
    numbered = {name for name in ignored if LAYER.search(name)}  # not harmless: a class lists one by its number
    harmless = ({*ignored} - numbered) | {name for name in left if is_buffer(tensors[name])}
    unread = [name for name in left if name not in beside | guessing | harmless]
    if unread:
        raise UserError(f"{place}: {refusal(unread, layers)}")
    used = {
        name: list(tensor.shape) for name, tensor in tensors.items() if name in taken or (further and name in guessing)
    }
    return Used(
        used, [name for name in left if name in beside], [name for name in left if name not in beside | used.keys()]
    )


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def refusal(unread: list[str], layers: int) -> str:
    """Return what to do about tensors that the model has no place for."""
    first = unread[0]
    layer = LAYER.search(first)
    if ADAPTER.search(first):
        do = "they are an adapter's: merge it into the base model's weights first (merge_and_unload of peft)"
    elif any(SCALES.search(f".{name}") for name in unread):
        do = "its weights are quantized: name a model with the original weights"
    elif layer and int(layer["number"]) >= layers:
        do = f"config.json says num_hidden_layers {layers}: correct it, or take out the layers that are not part of it"
    elif first.endswith(".bias"):
        do = "config.json gives the model no such bias (attention_bias and the like): correct it, or take them out"
    else:
        do = "correct config.json, or take them out if they are not part of the model"
    return f"the model of config.json has no place for {first_of(unread)}; {do}"


def check_dtypes(place: str, tensors: Mapping[str, Tensor], taken: Iterable[str], integers: Iterable[str]) -> None:
    """Raise `UserError` for an integer or float8 weight that nothing scales: libraries would take its numbers as they
    are. integers: names of buffers that hold integers."""
    allowed = {*integers}
    wrong = [
        name
        for name in taken
        if name not in allowed and (tensors[name].dtype in EIGHT_BITS or "F" not in tensors[name].dtype)
    ]
    if wrong:
        raise UserError(
            f"{place}: {first_of(wrong)} holds {tensors[wrong[0]].dtype}, and nothing scales it; name a model with the "
            "original weights"
        )


def check_whole(place: str, missing: Iterable[str], mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise `UserError` for tensors that are missing or have other shapes than the model's: libraries would initialise
    them at random. mismatched: name, shape that is stored, and the model's."""
    absent, other = sorted(missing), sorted(mismatched)
    if absent:
        raise UserError(
            f"{place}: lacks {first_of(absent)}, which the model of config.json has and libraries would fill at "
            "random; correct config.json, or download the weights again"
        )
    if other:
        name, theirs, ours = other[0]
        more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
        raise UserError(
            f"{place}: {name} is {list(theirs)}, and {list(ours)} in the model of config.json{more}; correct that, "
            "or download the weights again"
        )
