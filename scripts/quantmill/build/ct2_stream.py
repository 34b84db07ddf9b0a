"""Write CTranslate2's model.bin from its specification, one tensor at a time.

The bytes are those of ModelSpec.optimize and ModelSpec.save (ctranslate2/specs/model_spec.py), which hold all variables
in memory. A variable that equals an earlier one becomes its alias. CTranslate2's own code quantizes the others, some
rows at a time: each row has a scale of its own, so the numbers are the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ctranslate2.specs import model_spec
from ctranslate2.specs.model_spec import NumpyVariable, PyTorchVariable

from quantmill.build import deferred
from quantmill.checkpoint import ctranslate2_bin
from quantmill.checkpoint.ctranslate2_bin import Written


def write(path: str, spec: Any, quantization: str) -> None:
    """Write a validated `ModelSpec`, whose tensors may be deferred.

    Args:
        quantization: CTranslate2's name; not int16, which has one scale for all rows.

    Raises `UserError` for a variable that model.bin cannot hold.
    """
    stream = Stream(quantization)
    ctranslate2_bin.write(Path(path), spec.name, spec.revision, stream.variables(spec), stream.aliases)


class Stream:
    """The variables of a model, by name. `aliases`: those that equal an earlier one, as (name, earlier name)."""

    def __init__(self, quantization: str) -> None:
        self.quantization = quantization
        self.aliases: list[tuple[str, str]] = []
        self.alike: dict[tuple[Any, ...], dict[str, torch.Tensor]] = defaultdict(dict)
        self.digests: dict[str, bytes] = {}

    def variables(self, spec: Any) -> Iterator[Written]:
        """Yield the variables of a specification; each is quantized while it is written."""
        found: list[tuple[str, Any, bool]] = []

        def visit(layer: Any, name: str, value: Any) -> None:
            if not isinstance(value, str):  # optional, and not there
                found.append((name, value, hasattr(layer, f"{name.rpartition('/')[2]}_scale")))

        spec._visit(visit)
        for name, variable, quantizable in sorted(found, key=lambda each: each[0]):
            if variable.is_scalar():
                yield Written(name, variable.dtype, (), [variable.to_bytes()])
            else:
                yield from self.array(name, variable, quantizable)

    def array(self, name: str, variable: Any, quantizable: bool) -> Iterator[Written]:
        """Yield an array and, if it is quantized by rows, its scales; nothing if it equals an earlier one."""
        of_torch = isinstance(variable, PyTorchVariable)
        tensor = variable.tensor if of_torch else torch.from_numpy(variable.array.copy())
        blocks = deferred.blocks(tensor)
        block = next(blocks)
        if earlier := self.earlier(name, tensor, of_torch, block):
            self.aliases.append((name, earlier))
            return
        scales: list[np.ndarray] = []

        def quantize(block: torch.Tensor) -> Any:
            rows = Rows(PyTorchVariable(block) if of_torch else NumpyVariable(block.numpy()), quantizable)
            rows._quantize(self.quantization)
            if quantizable and not isinstance(rows.value_scale, str):
                scales.append(rows.value_scale.numpy())
            return rows.value

        rows = map(quantize, chain([block], blocks))
        start = next(rows)
        data: Iterable[memoryview] = map(elements, chain([start], rows))
        stored = deferred.find_stored(tensor)
        if stored and not scales and tensor.dtype == getattr(torch, start.dtype):  # the same bytes, without torch
            data = chain.from_iterable(each.chunks() for each in stored)
        yield Written(name, start.dtype, tuple(tensor.shape), data)
        if scales:
            scale = np.concatenate(scales)
            yield Written(f"{name}_scale", scale.dtype.name, scale.shape, [scale.tobytes()])

    def earlier(self, name: str, tensor: torch.Tensor, of_torch: bool, block: torch.Tensor) -> str | None:
        """Return the name of the first array that equals this one. Most differ in the first row, which is that of
        `block`, so few are read again."""
        alike = self.alike[of_torch, tensor.dtype, tuple(tensor.shape), deferred.comparable(block[:1])]
        if name.rpartition("/")[2] not in model_spec.SKIP_CREATING_ALIAS:
            for other, known in alike.items():
                if deferred.is_same(tensor, known) or self.digest(name, tensor) == self.digest(other, known):
                    return other
        alike[name] = tensor
        return None

    def digest(self, name: str, tensor: torch.Tensor) -> bytes:
        """Return the hash of an array, which is calculated once."""
        if name not in self.digests:
            self.digests[name] = deferred.digest(tensor)
        return self.digests[name]


class Rows(model_spec.LayerSpec):
    """Some rows of an array, as a layer that CTranslate2 quantizes."""

    def __init__(self, value: Any, quantizable: bool) -> None:
        self.value = value
        if quantizable:
            self.value_scale = model_spec.OPTIONAL


def elements(variable: Any) -> memoryview:
    """Return the bytes of a variable, as its `to_bytes` does, without a copy."""
    array = variable.tensor.view(torch.uint8).numpy() if isinstance(variable, PyTorchVariable) else variable.array
    return np.ascontiguousarray(array).data.cast("B")
