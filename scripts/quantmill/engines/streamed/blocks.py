"""A checkpoint's weights in parts: those of each block, of the embeddings, of the head, and all others.

transformers' own loader makes parameters of them, by its own rules for names, dtypes and stacked experts. It is given
only the tensors that belong to a part.
"""

from pathlib import Path
from typing import Any

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

from quantmill.checkpoint import shards
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
EMBEDDINGS, HEAD, REST = "embeddings", "head", "rest"  # parts that are not the number of a block


class Stored:
    """A stored tensor as transformers sees those of a file: indexing reads it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_dtype(self) -> str:
        """Return safetensors' name."""
        return self.tensor.dtype

    def get_shape(self) -> list[int]:
        """Return the shape, in elements."""
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        room, place = torch.empty(self.tensor.nbytes, dtype=torch.uint8), 0
        view = memoryview(room.numpy())
        for chunk in self.tensor.chunks():  # not mapped: pages of a file would count as this process's memory
            view[place : place + len(chunk)] = chunk
            place += len(chunk)
        return room.view(DTYPES[self.tensor.dtype]).reshape(self.tensor.shape)[index]


class Blocks:
    """A model without weights, and what loads and frees those of a part."""

    def __init__(self, artifact: Path, dtype: torch.dtype, device: str, **options: Any) -> None:
        """Build the model of `artifact`. `options` are for its class.

        Raises `UserError` for a model that has no list of as many blocks as it has layers, or other dtypes than floats.
        """
        self.artifact, self.device = artifact, device
        config = transformers.AutoConfig.from_pretrained(artifact, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False, **options
            )
        self.model: PreTrainedModel = model
        for each in (*model.parameters(), *model.buffers()):
            each._is_hf_initialized = True  # or it would be filled with random numbers
        # buffers that a class computes, such as frequencies, as `from_pretrained` makes them
        model._move_missing_keys_from_meta_to_device(set(), {"": device}, None, None)
        model._initialize_missing_keys(False)
        self.path, self.blocks = self._find_blocks()
        self.mapping = get_model_conversion_mapping(model)
        self.loading = LoadStateDictConfig(
            device_map={"": device}, dtype=dtype, dtype_plan=model._get_dtype_plan(dtype), weight_mapping=self.mapping
        )
        self.tensors = self._sort(shards.find(artifact).tensors())

    def _find_blocks(self) -> tuple[str, torch.nn.ModuleList]:
        layers = getattr(self.model.config.get_text_config(), "num_hidden_layers", None)
        lists = [
            (path, module)
            for path, module in self.model.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == layers
        ]
        if not lists:
            raise UserError(
                f"{self.artifact}: cannot run block by block, because {type(self.model).__name__} has no list of "
                f"{layers} blocks"
            )
        return max(lists, key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()))

    def _sort(self, tensors: dict[str, Tensor]) -> dict[Any, dict[str, Stored]]:
        """Return the stored tensors of each part, as transformers' rules name their parameters."""
        names = self.model.state_dict()
        renamings = [each for each in self.mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in self.mapping if isinstance(each, WeightConverter)]
        owners = {id(each): name for name, each in self.model.named_modules()}
        embeddings = f"{owners[id(self.model.get_input_embeddings())]}."
        head = self.model.get_output_embeddings()
        self.tied = head is None or head.weight is self.model.get_input_embeddings().weight
        ends = {embeddings: EMBEDDINGS} | ({} if head is None else {f"{owners[id(head)]}.": HEAD})
        parts: dict[Any, dict[str, Stored]] = {}
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise UserError(f"{self.artifact}: {name} is {tensor.dtype}, and only floats run block by block")
            renamed, _ = rename_source_key(name, renamings, converters, self.model.base_model_prefix, names)
            part: Any = next((kind for prefix, kind in ends.items() if renamed.startswith(prefix)), REST)
            if renamed.startswith(f"{self.path}."):
                part = int(renamed[len(self.path) + 1 :].partition(".")[0])
            if part == HEAD and self.tied:
                part = EMBEDDINGS
            parts.setdefault(part, {})[name] = Stored(tensor)
        return parts

    def load(self, part: Any) -> None:
        """Load the weights of a part. Raises `UserError` if some are missing or of another shape."""
        found, _ = convert_and_load_state_dict_in_model(self.model, dict(self.tensors.get(part, {})), self.loading)
        if part == EMBEDDINGS and self.tied:
            self.model.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
        wrong = sorted({*found.conversion_errors, *(entry[0] for entry in found.mismatched_keys)})
        if isinstance(part, int):
            prefix = f"{self.path}.{part}."
            wrong += [prefix + name for name, each in self.blocks[part].named_parameters() if each.is_meta]
        if wrong:
            raise UserError(
                f"{self.artifact}: {', '.join(dict.fromkeys(wrong[:3]))} cannot be loaded; download the model again"
            )

    def free(self, part: Any) -> None:
        """Free the weights of a part: a block, the embeddings or the head."""
        ends = {EMBEDDINGS: self.model.get_input_embeddings, HEAD: self.model.get_output_embeddings}
        module = self.blocks[part] if isinstance(part, int) else ends[part]()
        for each in module.modules():
            for name, value in each._parameters.items():
                if value is not None:
                    each._parameters[name] = torch.nn.Parameter(value.to("meta"), requires_grad=False)
            for name in each._buffers.keys() - each._non_persistent_buffers_set:
                if (value := each._buffers[name]) is not None:
                    each._buffers[name] = value.to("meta")
