"""Memory of caches, counted by hand."""

from dataclasses import asdict

import pytest

from quantmill.metrics import footprint
from quantmill.metrics.footprint import Cache, Footprint, Layers

WHOLE, SLIDING = Layers(2, 100.0), Layers(10, 10.0, window=1000)


def test_every_user_has_all_tokens() -> None:
    assert Cache([WHOLE]).nbytes(5000, 3) == 3 * 5000 * 2 * 100


def test_a_window_bounds_what_is_kept() -> None:
    """Transformers keeps a token less than the window, which is no window for a shorter text."""
    cache = Cache([WHOLE, SLIDING], beyond=-1)
    assert cache.nbytes(5000, 3) == 3 * (5000 * 2 * 100 + 999 * 10 * 10)
    assert cache.nbytes(500, 1) == 500 * 2 * 100 + 500 * 10 * 10
    assert Cache([SLIDING]).nbytes(5000, 1) == 5000 * 10 * 10  # an engine that does not mind windows


def test_tokens_are_kept_in_whole_pages() -> None:
    assert Cache([WHOLE], page=256).nbytes(257, 2) == 2 * 512 * 2 * 100


def test_users_share_a_pool() -> None:
    """llama-server's cells: 256 at a time for all users together, and one batch besides the windows."""
    cache = Cache([WHOLE, SLIDING], page=256, beyond=512, pooled=True)
    assert (
        cache.nbytes(1001, 4) == 4096 * 2 * 100 + 4096 * 10 * 10
    )  # 4,004 and 4,512 tokens, the second at most the first
    assert cache.nbytes(3000, 4) == 12032 * 2 * 100 + 4608 * 10 * 10


def test_a_state_is_of_each_user_however_long_the_text() -> None:
    cache = Cache([WHOLE, Layers(3, 0.0, state_bytes=7.0)], page=256, pooled=True)
    assert cache.nbytes(256, 4) - cache.nbytes(256, 2) == 2 * (256 * 2 * 100 + 3 * 7)


def test_vllm_pads_kinds_of_layers_to_equal_groups() -> None:
    """Of Gemma 3 1B, 22 layers have a window and 4 have none: the 22 take the room of 24. Of 13 and 12, each takes that
    of 13. A window may begin within a block."""
    paged = {"page": 16, "beyond": 2047, "spare": 1, "grouped": True}
    cache = Cache([Layers(22, 1.0, window=512), Layers(4, 1.0)], **paged)
    assert cache.nbytes(32768, 1) == 24 * (2560 + 16) + 4 * 32768  # 511 + 2,048 tokens are 160 blocks
    assert Cache([Layers(13, 1.0), Layers(12, 1.0, window=16)], **paged).nbytes(32, 1) == 13 * 32 + 13 * (32 + 16)


def test_bytes_of_a_token_are_known_without_windows_and_states() -> None:
    assert Cache([WHOLE, Layers(1, 0.5)]).bytes_per_token() == 200
    assert Cache([WHOLE, SLIDING]).bytes_per_token() is None
    assert Cache([WHOLE, Layers(1, 0.0, state_bytes=8)]).bytes_per_token() is None


@pytest.mark.parametrize("cache", [None, Cache([WHOLE, SLIDING], page=16, beyond=3, spare=1, pooled=True)])
def test_a_footprint_is_read_from_a_result(cache: Cache | None) -> None:
    held = Footprint(12, cache)
    assert footprint.read(asdict(held)) == held
