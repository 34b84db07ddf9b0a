"""Layers of transformers' cache, from one that a few tokens were read into."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from transformers import DynamicCache

from quantmill.metrics.footprint import Layers

NAMES = ("keys", "values", "indexer_keys")  # tensors whose last axis but one is that of tokens
STATES = ("conv_states", "recurrent_states")  # tensors by number, of layers without keys


def layers(cache: Any) -> list[Layers] | None:
    """Return the layers of a cache that one sequence was read into; None if a model has a cache of its own. A layer
    that uses another's keys is not in it."""
    if type(cache) is not DynamicCache:
        return None
    found: Counter[tuple[float, int | None, float]] = Counter()
    for layer in getattr(cache, "layers", None) or _of_version_4(cache):
        if type(layer).__module__ not in (DynamicCache.__module__, "types"):
            return None
        kept = [each for name in NAMES if (each := getattr(layer, name, None)) is not None]
        states = [each for name in STATES for each in getattr(layer, name, {}).values() if each is not None]
        window = layer.sliding_window if getattr(layer, "is_sliding", False) else None
        found[sum(each.nbytes / each.shape[-2] for each in kept), window, sum(each.nbytes for each in states)] += 1
    return [Layers(count, *kept) for kept, count in found.items() if kept[0] or kept[2]]


def _of_version_4(cache: Any) -> list[Any]:
    """Return the layers of transformers 4's cache, which has pairs of keys and values."""
    return [SimpleNamespace(keys=keys, values=values) for keys, values in cache]
