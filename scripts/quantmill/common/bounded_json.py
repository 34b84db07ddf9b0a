"""Read untrusted JSON with bounded memory and without duplicate keys."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

MAX_BYTES = 16 * 2**20  # headers and indexes of the largest models (90,000 tensors) are 9 MB
MAX_VALUES = 800_000  # about; a tensor in a header has 8. A value takes up to 200 bytes of memory, of 1.5 in the file


def loads(
    data: bytes,
    limit: int = MAX_BYTES,
    values: int = MAX_VALUES,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:
    """Parse UTF-8 JSON. Raises ValueError if it is not JSON, is too large, or has a duplicate key.

    Args:
        limit: bytes at most.
        values: values at most, approximately.
        parse_constant: as of json.loads; it converts NaN and infinity, or raises.
    """
    if len(data) > limit:
        raise ValueError(f"over {limit >> 20} MiB")
    if sum(map(data.count, (b",", b"[", b"{"))) > values:
        raise ValueError(f"more than {values} values")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r:.80} occurs twice")
    return content
