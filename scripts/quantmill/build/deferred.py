"""Tensors of torch that are read from a checkpoint when they are written, for libraries that rearrange weights first.

A library that renames, joins, splits or permutes weights gets deferred tensors in their place. Each of its steps is
noted and gives another deferred tensor, of the right shape and dtype. `blocks` then takes the steps, for one tensor at
a time.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from quantmill.checkpoint.tensor import DTYPE_BYTES, Tensor

BLOCK = 2**18  # elements at a time: what is made of them stays in a cache of 2 MiB, and larger blocks are no faster
DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
DTYPES |= {"I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
UNCHANGED = ("detach", "contiguous")  # methods after which a tensor has the same elements in the same order
PLACES = ("data_ptr", "storage", "untyped_storage")  # methods that tell where the elements are
DATA = torch.Tensor.data


@dataclass(frozen=True)
class Step:
    """A call of a function of torch. `args`, `kwargs`: its arguments, with recipes in the place of deferred tensors.
    `part`: the place in the sequence that it returns; None if it returns one tensor."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    part: int | None = None


class Deferred(torch.Tensor):
    """A tensor of which only the shape, the dtype and the way to its elements are known.

    Functions of torch return deferred tensors for it. Where elements decide what they return, as in `item()`, they get
    them. Unlike in torch, assigning to a part of one changes neither the tensors that it was made of nor its earlier
    views. Functions that change a tensor in place raise NotImplementedError.
    """

    recipe: Tensor | Step
    form: torch.Tensor  # the same tensor on the device "meta", which has no elements

    @staticmethod
    def __new__(cls: type["Deferred"], recipe: Tensor | Step, form: torch.Tensor) -> "Deferred":
        # on the CPU, because libraries take the device "meta" for a weight that the checkpoint lacks
        self = torch.Tensor._make_wrapper_subclass(cls, form.shape, dtype=form.dtype, device="cpu")
        self.recipe, self.form = recipe, form
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _call(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} wants elements of a tensor that is not read yet")


def of(tensor: Tensor) -> Deferred:
    """Return a stored tensor as one of torch. Raises ValueError for a dtype that CTranslate2's loaders do not know."""
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{tensor.name} has the dtype {tensor.dtype}")
    return Deferred(tensor, torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta"))


def blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements, in order, as tensors of some rows each. A block is valid until the next one, and the
    caller may change it.

    Rows of stored tensors, and of tensors that were joined by their rows or had their dtype changed, are read `BLOCK`
    elements at a time. Others are held whole.
    """
    yield from _blocks(tensor.recipe) if isinstance(tensor, Deferred) else _rows(tensor)


def find_stored(tensor: torch.Tensor) -> list[Tensor]:
    """Return the stored tensors whose elements, one after another, are this one's; none if it was made otherwise."""
    recipe = _recipe(tensor)
    joined = isinstance(recipe, Step) and recipe.function is torch.cat and len(recipe.args) == 1 and not recipe.kwargs
    parts = list(recipe.args[0]) if joined else [recipe]
    alike = all(isinstance(each, Tensor) and DTYPES[each.dtype] == tensor.dtype for each in parts)
    return parts if alike else []


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two deferred tensors have the same recipe, as tied weights do."""
    return isinstance(one, Deferred) and isinstance(other, Deferred) and one.recipe is other.recipe


def digest(tensor: torch.Tensor) -> bytes:
    """Return a hash that is the same for equal values of the same dtype; none of them is NaN (checkpoint.finite)."""
    found = hashlib.sha256()
    for block in blocks(tensor):
        found.update(comparable(block))
    return found.digest()


def comparable(values: torch.Tensor) -> bytes:
    """Return the bytes of values, with 0 for -0, which equals it."""
    return (values + 0).reshape(-1).view(torch.uint8).numpy().tobytes()


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    """Note a function's call, and return what it returns."""
    first: Any
    name, (first, *rest) = function.__name__, args or (None,)
    if function is torch.equal:
        return (first.shape, first.dtype, digest(first)) == (rest[0].shape, rest[0].dtype, digest(rest[0]))
    if name == "requires_grad_":
        return function(*args, **kwargs)
    if name == "__setitem__":
        if not isinstance(first, Deferred):  # an ordinary tensor gets the elements
            return function(*_each(_value, args))
        first.recipe = Step(_assign, _each(_recipe, args), {})
        return None
    if function == DATA.__set__ and len({(each.shape, each.dtype, type(each)) for each in args}) == 1:
        first.recipe = rest[0].recipe
        return None
    in_place = "out" in kwargs or function == DATA.__set__ or (name.endswith("_") and not name.startswith("_"))
    if in_place or name in PLACES:
        raise NotImplementedError(f"{name} wants the elements of a weight before it is read")
    if name == "to":  # another device would be an order to read it
        dtype = next((each for each in (*rest, *kwargs.values()) if isinstance(each, torch.dtype)), first.dtype)
        if dtype == first.dtype:
            return Deferred(first.recipe, first.form)
        args, kwargs = (first, dtype), {}
    try:
        found = function(*_each(_form, args), **_each(_form, kwargs))
    except (RuntimeError, TypeError, ValueError):  # elements decide, or it is an error there too
        return function(*_each(_value, args), **_each(_value, kwargs))
    if isinstance(found, torch.Tensor):
        whole = name == "__getitem__" and rest[0] is ...
        if whole or name in UNCHANGED or function == DATA.__get__:
            return Deferred(first.recipe, found)
        return Deferred(Step(function, _each(_recipe, args), _each(_recipe, kwargs)), found.to("meta"))
    if isinstance(found, tuple | list) and any(isinstance(each, torch.Tensor) for each in found):
        step = Step(function, _each(_recipe, args), _each(_recipe, kwargs))
        return type(found)([Deferred(replace(step, part=place), each) for place, each in enumerate(found)])
    return function(*args, **kwargs) if name == "__get__" else found


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments of a function with each one changed, in sequences too."""
    if isinstance(value, dict):
        return {key: _each(change, each) for key, each in value.items()}
    return type(value)(_each(change, each) for each in value) if type(value) in (tuple, list) else change(value)


def _recipe(value: Any) -> Any:
    return value.recipe if isinstance(value, Deferred) else value


def _form(value: Any) -> Any:
    if isinstance(value, Deferred):
        return value.form
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _value(value: Any) -> Any:
    """Return the elements of a deferred tensor, or of a step to one."""
    recipe = _recipe(value)
    if isinstance(recipe, Tensor):
        return _read(recipe)
    if not isinstance(recipe, Step):
        return recipe
    found = recipe.function(*_each(_value, recipe.args), **_each(_value, recipe.kwargs))
    return found if recipe.part is None else found[recipe.part]


def _assign(tensor: torch.Tensor, where: Any, value: Any) -> torch.Tensor:
    copy = tensor.clone()
    copy[where] = value
    return copy


def _read(tensor: Tensor) -> torch.Tensor:
    return _of_bytes(next(tensor.chunks(tensor.nbytes), memoryview(b"")), tensor).reshape(tensor.shape)


def _of_bytes(data: memoryview, tensor: Tensor) -> torch.Tensor:
    """Return bytes of a tensor as its elements, without a copy."""
    dtype = DTYPES[tensor.dtype]
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _blocks(recipe: Tensor | Step) -> Iterator[torch.Tensor]:
    if isinstance(recipe, Tensor):
        if not recipe.shape or not recipe.numel:
            yield _read(recipe)
            return
        row = recipe.nbytes // recipe.shape[0]
        for data in recipe.chunks(max(1, BLOCK * DTYPE_BYTES[recipe.dtype] // row) * row):
            yield _of_bytes(data, recipe).reshape(-1, *recipe.shape[1:])
    elif recipe.function is torch.cat and len(recipe.args) == 1 and not recipe.kwargs:
        for each in recipe.args[0]:
            yield from _blocks(each) if isinstance(each, Tensor | Step) else _rows(each)
    elif recipe.function is torch.Tensor.to:
        yield from (block.to(*recipe.args[1:]) for block in _blocks(recipe.args[0]))
    else:
        yield from _rows(_value(recipe).contiguous())


def _rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    tensor = torch.atleast_1d(tensor)
    for rows in tensor.split(max(1, BLOCK * len(tensor) // max(1, tensor.numel()))):
        yield rows.clone()
