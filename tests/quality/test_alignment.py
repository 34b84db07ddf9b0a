"""Checks that an engine answers for its tokens: the chosen ones are compared with its logits."""

import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import REPO

from quantmill.common.program import UserError
from quantmill.quality import alignment

sys.path.append(str(REPO / "tests/helpers/harness/engines"))
import fake


def test_ties_and_tokens_that_are_never_chosen_pass() -> None:
    class Tied(fake.Engine):
        """The likeliest token is 1, which ends a sequence and is never chosen; then two are equally likely."""

        stop_ids = (1,)

        def __init__(self) -> None:
            self.calls = 0

        def logits(self, ids: list[int]) -> Any:
            rows = np.zeros((len(ids), fake.VOCAB), np.float32)
            rows[:, 2:4] = 5
            rows[:, 1] = 9
            yield rows

        def decode(self, prompts: list[list[int]], n: int) -> Any:
            for _ in range(n):
                self.calls += 1
                yield 0, 2 + self.calls % 2, time.perf_counter()

    alignment.check_decoding(Tied(), [list(range(30))], fake.BOS)


def test_the_largest_gap_is_the_worst_choices() -> None:
    class Known:
        """After every token, token 0 has probability 1/2, 1 has 1/4 and 2 the rest; 3 ends a sequence."""

        stop_ids: ClassVar = [3]

        def __init__(self, size: int) -> None:
            self.size = size  # rows of a chunk

        def logits(self, ids: list[int]) -> Iterator[np.ndarray]:
            for start in range(0, len(ids), self.size):
                rows = min(self.size, len(ids) - start)
                yield np.tile(np.log(np.array([0.5, 0.25, 0.25, 2.0], np.float32)), (rows, 1))

    for size in range(1, 9):
        engine = Known(size)
        assert alignment.largest_gap(engine, [1, 2, 1, 2], [[0, 0, 0]]) == 0
        for worst in ([1, 0, 0], [0, 1, 0], [0, 0, 1]):
            assert alignment.largest_gap(engine, [1, 2, 1, 2], [[0, 0, 0], worst]) == pytest.approx(np.log(2))


def test_checks_of_prompts_of_one_token() -> None:
    class Steady(fake.Engine):
        """Decodes what its logits say."""

        def __init__(self) -> None:
            self.prefill = self.step = self.noise = 0.0
            self.fault, self.other_way = None, None

    alignment.check_decoding(Steady(), [[3], [7]], fake.BOS)


def test_an_older_version_of_probes_is_an_error() -> None:
    with pytest.raises(UserError, match=r"has no probes: an older version made it; delete expected\.json"):
        alignment.check_logits(fake.Engine.__new__(fake.Engine), [1] * 50, None)
