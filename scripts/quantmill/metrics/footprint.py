"""Memory of an artifact in use: its weights, and what its users' tokens leave in the cache.

An engine describes its cache while it is measured (`Engine.footprint`), whatever the length of the texts. The report
then counts it at the config's `memory_at`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# bytes of a number, by the names of types in vLLM, transformers and CTranslate2
VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class Layers:
    """Layers that keep the same.

    token_bytes: of a token's keys and values in one layer. window: tokens that a layer looks back at; None: all.
    state_bytes: what one layer keeps of each user, however long the text is.
    """

    count: int
    token_bytes: float
    window: int | None = None
    state_bytes: float = 0


@dataclass(frozen=True)
class Cache:
    """An engine's way to keep keys and values.

    page: tokens are kept in pages of this number. beyond: tokens that a layer keeps besides its window, at most; None:
    all tokens, whatever the window. spare: pages more of such a layer. pooled: all users share the pages. grouped:
    layers of different kinds are padded to groups of equal numbers.
    """

    layers: Sequence[Layers]
    page: int = 1
    beyond: int | None = None
    spare: int = 0
    pooled: bool = False
    grouped: bool = False

    def nbytes(self, context: int, users: int) -> int:
        """Return the bytes that `users` take, each with a text of `context` tokens."""
        pools, sharing = (1, users) if self.pooled else (users, 1)
        total = 0.0
        for layers in self.layers:
            tokens = self._tokens(layers.window, context, sharing)
            total += self._pad(layers.count) * (pools * tokens * layers.token_bytes + users * layers.state_bytes)
        return round(total)

    def bytes_per_token(self) -> int | None:
        """Return the bytes that each token of any text adds; None if some layer has a window or keeps a state."""
        if any(each.window is not None or each.state_bytes for each in self.layers):
            return None
        return round(sum(each.count * each.token_bytes for each in self.layers))

    def _tokens(self, window: int | None, context: int, sharing: int) -> int:
        """Return the tokens that a layer has room for, in pages that `sharing` users share."""
        whole = self._round_to_page(context * sharing)
        if window is None or self.beyond is None:
            return whole
        return self._round_to_page(min(whole, window * sharing + self.beyond)) + self.spare * self.page

    def _round_to_page(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def _pad(self, count: int) -> int:
        """Return a number of layers as vLLM pads it: to groups of the smallest kind's number, or of the largest's if
        that is less than 1.5 times as many (vllm/v1/core/kv_cache_utils.py, 0.32)."""
        if not self.grouped:
            return count
        least, most = (end(each.count for each in self.layers) for end in (min, max))
        group = most if most < 1.5 * least else least
        return -(-count // group) * group


@dataclass(frozen=True)
class Footprint:
    """Memory that an artifact takes. weight_bytes: all its weights, as loaded. cache: None if it is not known."""

    weight_bytes: int
    cache: Cache | None


def read(found: Mapping[str, Any]) -> Footprint:
    """Return a footprint from the mapping that `dataclasses.asdict` returns."""
    cache = found["cache"]
    layers = cache and [Layers(**each) for each in cache["layers"]]
    return Footprint(found["weight_bytes"], cache and Cache(**cache | {"layers": layers}))
