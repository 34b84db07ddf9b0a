"""List the tensors of a checkpoint that its model uses, as the model's class in transformers takes them.

    python scripts/quantmill fetch.name_tensors SOURCE OUT [--further-layers]

The class is built from config.json without memory for its weights. It is asked which stored names it takes, by its own
rules for experts, tied weights and older names; only the files' headers are read. Buffers that every library computes
itself, and multi-token prediction layers (unless --further-layers), are dropped from all that is made of the model.
Anything else that is left over, missing, of another shape, or not scaled is refused.
"""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel

from quantmill.checkpoint import headers, used
from quantmill.checkpoint.tensor import Tensor
from quantmill.common import limited, remote_code
from quantmill.common.atomic import write_atomically
from quantmill.common.program import UserError, first_line, parser

FLOAT = torch.float32  # of every weight here; only `used.check_dtypes` looks at the stored dtype
MEGABYTES, SECONDS = 4096, 600  # to build the class; 61 layers of 256 experts take 500 MB and 20 s


class Stored:
    """A stored tensor as transformers sees those of a file: indexing reads it, which is recorded."""

    def __init__(self, tensor: Tensor, taken: set[str]) -> None:
        self.tensor = tensor
        self.taken = taken

    def get_dtype(self) -> str:
        """Return safetensors' name."""
        return self.tensor.dtype

    def get_shape(self) -> list[int]:
        """Return the shape, in elements."""
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.taken.add(self.tensor.name)
        return torch.empty(self.tensor.shape, dtype=FLOAT, device="meta")[index]


def build(folder: Path) -> PreTrainedModel:
    """Build the model of a config.json on the meta device. Raises what transformers raises if it has no such causal
    language model."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=FLOAT, trust_remote_code=False)


def name_tensors(source: headers.Model, further: bool) -> used.Used:
    """Sort the tensors of a checkpoint whose config.json fits its headers; see `used.sort`. Raises `UserError` as the
    functions there do, and for a model that transformers does not know."""
    place, tensors = str(source.checkpoint.folder), source.tensors
    try:
        model = build(source.checkpoint.folder)
        integers = integer_buffers(model)
        taken, ignored, loaded = ask(model, tensors)
    except Exception as error:  # its many config and model classes raise anything
        raise UserError(f"{place}: transformers cannot build a language model from it ({first_line(error)})") from None
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = used.sort(place, tensors, taken, ignored, layers if isinstance(layers, int) else 0, further)
    used.check_whole(place, loaded.missing_keys, loaded.mismatched_keys)
    if loaded.conversion_errors:
        name = min(loaded.conversion_errors)
        raise UserError(f"{place}: transformers cannot make {name} of what is stored; download the weights again")
    used.check_dtypes(place, tensors, taken, integers)
    return found


def integer_buffers(model: PreTrainedModel) -> set[str]:
    """Return names that buffers of integers may be stored under."""
    prefix = f"{model.base_model_prefix}."
    names = [name for name, buffer in model.named_buffers() if not buffer.is_floating_point()]
    return {each for name in names for each in (name, name.removeprefix(prefix))}


def ask(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> tuple[set[str], set[str], Any]:
    """Return the stored names that a model takes, those of the others that its class ignores, and transformers' report.
    Its own loader runs, on tensors without elements."""
    taken: set[str] = set()
    mapping = get_model_conversion_mapping(model)
    names = model.state_dict()
    loaded, _ = convert_and_load_state_dict_in_model(
        model,
        {name: Stored(tensor, taken) for name, tensor in tensors.items()},
        LoadStateDictConfig(device_map={"": "meta"}, dtype=FLOAT, weight_mapping=mapping),
    )
    model.tie_weights(missing_keys=loaded.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(loaded)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    ignored = set()
    for name in tensors.keys() - taken:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        if renamed not in loaded.unexpected_keys:
            ignored.add(name)
    return taken, ignored, loaded


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("source", type=Path, help="folder of the checkpoint")
    arguments.add_argument("out", type=Path, help="JSON file to write")
    arguments.add_argument("--further-layers", action="store_true", help="multi-token prediction layers are used")
    options = arguments.parse_args()

    remote_code.forbid()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = headers.read(options.source)
    config = options.source / "config.json"

    def refuse(*_: Any) -> NoReturn:
        raise UserError(f"{config}: its model was not built in {SECONDS} s of processor time; its sizes are wrong")

    # unknown keys may hold large sizes; modules are Python objects, so a signal interrupts their creation
    signal.signal(signal.SIGXCPU, refuse)
    with limited.step(str(config), megabytes=MEGABYTES, seconds=SECONDS):
        found = name_tensors(source, options.further_layers)
    with write_atomically(options.out) as partial:
        found.write(partial)
