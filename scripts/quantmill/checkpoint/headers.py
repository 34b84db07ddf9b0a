"""Check a model's config.json against the headers of its weights before any library builds the model. Every program
that takes a model from outside reads it here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantmill.checkpoint import EMBEDDINGS, layer_shapes, shards, sizes
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor, refuse_pointer
from quantmill.common.program import UserError

# what torch.compile, FSDP and activation checkpointing insert into names, wherever they wrapped a module
COMPONENTS = re.compile(r"\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
WRAPPERS = ("module.", "base_model.model.", "model.")  # before all names: of DDP, of PEFT, of trainers
BODIES = ("model.", "transformer.", "gpt_neox.", "backbone.")  # where decoders' own names begin
HEADS = ("lm_head.", "embed_out.")
# types whose embeddings take no padding id, which transformers then ignores
UNPADDED = (
    *("bloom", "codegen", "falcon", "falcon_mamba", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "mamba"),
    *("gpt_neox_japanese", "gptj", "mamba2", "mpt", "nemotron_h", "rwkv", "xlnet", "xlstm"),
)
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Model:
    """A consistent model's folder. `tensors` go by their own names; `dropped` is the prefix removed from those in the
    files."""

    checkpoint: Checkpoint
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    dropped: str


def read(folder: Path) -> Model:
    """Read a model's folder. Raises `UserError` if it is inconsistent: see `check`."""
    found = shards.find(folder)
    for path in found.others():
        refuse_pointer(path)
    config = found.config()
    tensors, dropped = own_names(folder, config, found.tensors())
    check(folder / "config.json", config, tensors)
    return Model(found, config, tensors, dropped)


def check(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Raise `UserError` for an empty tensor, for sizes of a config.json that its tensors do not have, and for invalid
    ids.

    Args:
        path: of the config.json.
        tensors: of the model; None before they are known: then only sizes that no model has are refused.
    """
    refuse_empty(tensors or {})
    if config.get("model_type") in (*layer_shapes.KNOWN,):
        kind, listed = config["model_type"], (key for key in config if key in sizes.WHOLE)
        if config.get("text_config") is not None:
            raise UserError(f"{path}: has a text_config, and a {kind} reads only text; remove it")
        if key := next((key for key in listed if isinstance(config[key], list)), None):
            raise UserError(f"{path}: {key} is a list, and all layers of a {kind} are alike; {sizes.WRONG}")
    sizes.check(path, config, tensors)
    for tensor, due in layer_shapes.mismatches(sizes.text_words(config), tensors or {}):
        raise UserError(
            f"{tensor.path}: {tensor.name} is {list(tensor.shape)}, and config.json makes it {list(due)}; one of the "
            "two is another model's"
        )
    check_ids(path, config)


def refuse_empty(tensors: Mapping[str, Tensor]) -> None:
    """Raise `UserError` for a tensor without elements."""
    if empty := next((each for each in tensors.values() if not each.numel), None):
        raise UserError(
            f"{empty.path}: {empty.name} is empty (its shape is {list(empty.shape)}); save the model again with all "
            "of its weights gathered"
        )


def check_ids(path: Path, config: Mapping[str, Any]) -> None:
    """Raise `UserError` for token ids that are not numbers, and for a padding id without a row in the embeddings of
    transformers' classes. Other ids beyond the vocabulary stand for no token: see `special_tokens`."""
    words = sizes.text_words(config)
    for name in IDS:
        value = words.get(name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and type(each) is not int:
                raise UserError(f"{path}: {name} is {each!r:.60}, where a token's id is expected; correct it")
    padding, vocabulary = words.get("pad_token_id"), words.get("vocab_size")
    if type(padding) is not int or type(vocabulary) is not int or words.get("model_type") in UNPADDED:
        return
    if not -vocabulary <= padding < vocabulary:  # from the end, as torch counts
        raise UserError(
            f"{path}: pad_token_id is {padding}, and the vocabulary ends at {vocabulary - 1}; set it to null, or to "
            "the id of a token"
        )


def own_names(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Return the tensors by the names that the model's class has for them, and the prefix removed from the names in the
    files. Raises `UserError` if only some names have the prefix, or two names become one."""
    inside = {found for name in tensors for found in COMPONENTS.findall(name)}
    names = {name: COMPONENTS.sub("", name) for name in tensors} if inside else {name: name for name in tensors}
    prefix = _wrapper([*names.values()], sizes.text_words(config).get("model_type"))
    if not prefix and (odd := next((name for name in names.values() if name.startswith(WRAPPERS[:2])), None)):
        other = next(name for name in names.values() if not name.startswith(odd.split(".")[0]))
        raise UserError(
            f"{folder}: {odd} has a prefix that {other} does not have; save the model's own state_dict again"
        )
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = names[name].removeprefix(prefix)
        if own in found:
            raise UserError(f"{tensor.path}: {name} is {own} twice; save the model's own state_dict again")
        found[own] = replace(tensor, name=own)
    return found, "".join((*sorted(inside), prefix))


def _wrapper(names: Sequence[str], model_type: Any) -> str:
    """Return the prefix of all names: for types with known names any text, for others names of `WRAPPERS`; `model.`
    only if each is followed by the name of a body or a head."""
    if model_type in layer_shapes.LLAMAS:
        place = next((name for name in names if name.endswith(EMBEDDINGS)), EMBEDDINGS).removesuffix(EMBEDDINGS)
        return place if (not place or place.endswith(".")) and all(name.startswith(place) for name in names) else ""
    prefix = ""
    while True:
        rest = [name.removeprefix(prefix) for name in names]
        found = next((each for each in WRAPPERS if all(name.startswith(each) for name in rest)), None)
        if found == "model.":
            own = [name.removeprefix(found) for name in rest]
            has_body = any(name.startswith(BODIES) for name in own)
            if not has_body or not all(name.startswith(BODIES + HEADS) for name in own):
                return prefix
        if found is None:
            return prefix
        prefix += found
