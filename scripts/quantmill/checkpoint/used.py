"""Which of a checkpoint's tensors its model uses: what fetch.name_tensors asked of transformers, once for all
artifacts.

A tensor that no class takes up is either a buffer that every library computes for itself, a layer that guesses further
tokens, a part that sees or hears, or a sign that config.json is of another model: then nothing is made of it.
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

# rotary embeddings' frequencies and tables, positions, and what a mask puts where nothing is to be seen
BUFFERS = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|cos_cached|sin_cached|position_ids|masked_bias|embed_positions\.weights)$"
)
MASKS = re.compile(r"att\w*\.(bias|mask|attn_mask|causal_mask|attention_mask)$")  # where their shape is a mask's
NEXT = re.compile(r"(^|\.)mtp\w*\.")  # layers that guess further tokens (multi-token prediction), by their own name
# and those that are numbered on after the model's own, which have these besides (DeepSeek, GLM)
NUMBERED = re.compile(r"(?P<layer>(^|\.)layers\.\d+)\.(.*\.)?(eh_proj|enorm|hnorm|shared_head)\.")
LAYER = re.compile(r"(?P<layer>(^|\.)(layers|h|blocks)\.(?P<number>\d+))\.")
ADAPTER = re.compile(r"(^|\.)(lora_\w+|modules_to_save|prompt_encoder|ia3_\w+)\.|^base_model\.model\.")
SCALES = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|\w*scale(_inv)?|\w*absmax|SCB|weight_packed|\w*zero_point|quant_map|trellis)$"
)
EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "F8_E8M0")  # which nobody trains in: something scales them


@dataclass(frozen=True)
class Used:
    """Names of a checkpoint's tensors: `used` with their shapes; `beside`, which stay where they are and which a text
    never reaches; and what is `dropped`."""

    used: dict[str, list[int]]
    beside: list[str]
    dropped: list[str]

    def kept(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All that is not dropped."""
        left_out = {*self.dropped}
        return {name: tensor for name, tensor in tensors.items() if name not in left_out}

    def as_source(self) -> dict[str, list[str]]:
        """What the manifest of each artifact says of it, in `source`: nothing where the model uses every tensor."""
        return {name: names for name, names in (("dropped", self.dropped), ("beside", self.beside)) if names}

    def write(self, path: Path) -> None:
        """Write the list as JSON, a tensor a line."""
        path.write_text(json.dumps(asdict(self), indent=0) + "\n", encoding="utf-8")


def read(path: Path, tensors: Mapping[str, Tensor]) -> Used:
    """The list of `Used.write`. Raises `UserError` where it is not of these tensors."""
    found = Used(**json.loads(path.read_text(encoding="utf-8")))
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    listed = found.used.keys() | {*found.beside, *found.dropped}
    if listed != shapes.keys() or any(shapes[name] != shape for name, shape in found.used.items()):
        raise UserError(f"{path}: is of other weights than these; delete it and run again")
    return found


def beside(folder: Path) -> set[str]:
    """Names of the tensors in a folder of ours that its model does not use, though they stay there."""
    origin = manifest.read(folder)["source"] if (folder / manifest.NAME).exists() else {}
    return {*origin.get("beside", ())}


def is_buffer(tensor: Tensor) -> bool:
    """Whether a tensor is one that every library computes for itself, as older ones wrote it beside the weights."""
    shape = tensor.shape
    square = len(shape) >= 2 and shape[-1] == shape[-2] and all(size == 1 for size in shape[:-2])
    is_mask = square and (len(shape) == 4 or tensor.dtype in ("BOOL", "U8"))
    return bool(BUFFERS.search(tensor.name) or (is_mask and MASKS.search(tensor.name)))


def further_layers(names: Iterable[str]) -> set[str]:
    """Those of some names that belong to layers that guess further tokens."""
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
        place: what errors call the checkpoint.
        taken: names that the model's class takes up; `ignored`: of the others, those that it says to be no fault.
        layers: how many the config says that the model has.
        further: whether layers that guess further tokens are used, by a run of the study.

    Raises `UserError` with the first of those that nothing explains.
    """
    taken = set(taken)
    left = [name for name in tensors if name not in taken]
    guessing = further_layers(left)
    beside = {name for name in left if reads_more_than_text(name) and name not in guessing}
    numbered = {name for name in ignored if LAYER.search(name)}  # whatever they are: a class names one by its number
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
    """What to do about tensors that the model has no place for."""
    first = unread[0]
    layer = LAYER.search(first)
    if ADAPTER.search(first):
        do = "they are an adapter's: merge it into the base model's weights first (merge_and_unload of peft)"
    elif any(SCALES.search(f".{name}") for name in unread):
        do = "its weights are quantized: name a model with the original weights"
    elif layer and int(layer["number"]) >= layers:
        do = f"config.json says num_hidden_layers {layers}: correct it, or take out the layers that are no part of it"
    elif first.endswith(".bias"):
        do = "config.json gives the model no such bias (attention_bias and the like): correct it, or take them out"
    else:
        do = "correct config.json, or take them out if they are no part of the model"
    return f"the model of config.json has no place for {first_of(unread)}; {do}"


def check_dtypes(place: str, tensors: Mapping[str, Tensor], taken: Iterable[str], integers: Iterable[str]) -> None:
    """Raises `UserError` for a weight of numbers that something should scale: libraries take them as they are.

    integers: names of buffers that hold integers.
    """
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
    """Raises `UserError` where tensors are missing or have other shapes than the model, which libraries would fill at
    random.

    mismatched: name, shape that is stored, and the model's.
    """
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
