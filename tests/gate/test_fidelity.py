"""An engine beside what its weights say: engines of numpy whose divergence is known."""

from collections.abc import Iterator

import numpy as np
import pytest
from fake_engine import VOCAB, Fake

from quantmill.common.program import UserError
from quantmill.gate import fidelity
from quantmill.gate.fidelity import Predictions, check, divergence, places, tolerance
from quantmill.metrics.windows import Window
from quantmill.quality.teacher_forcing import Text

SIZE = 300  # of a window


class Changed(Fake):
    """The engine, but that logits from some position of a window on are others: `power` times as sure."""

    def __init__(self, power: float, start: int = 0) -> None:
        super().__init__()
        self.power, self.start = power, start

    def logits(self, ids: list[int]) -> Iterator[np.ndarray]:
        rows = np.concatenate(list(super().logits(ids)))
        rows[self.start :] *= self.power
        yield rows


def text(windows: int = 3) -> Text:
    ids = np.random.default_rng(3).integers(0, VOCAB, SIZE * windows).tolist()
    cuts = [Window(low, low + SIZE, low + 1, low + SIZE) for low in range(0, SIZE * windows, SIZE)]
    return Text(ids, cuts, [SIZE - 1.0] * windows, {})


def expect(engine: Fake) -> dict:
    found = Predictions(engine, text())
    return found.as_json() | {
        "against": "its own weights",
        "compared_perplexity": found.perplexity,
        "compute_type": "float32",
    }


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)


def test_the_same_engine_diverges_by_nothing() -> None:
    found = check(expect(Fake()), Predictions(Fake(), text(), expect(Fake())), text(), "float32")
    assert found == {"divergence": 0.0, "tolerance": 1e-5, "against": "its own weights"}


def test_perplexity_is_that_of_all_scored_positions() -> None:
    ids = text().ids
    table = softmax(Fake().table.astype(float))
    nll = [-np.log(table[ids[place - 1], ids[place]]) for place in range(len(ids)) if place % SIZE]
    assert Predictions(Fake(), text()).perplexity == pytest.approx(np.exp(np.mean(nll)), rel=1e-6)


def test_divergence_is_the_larger_of_both_directions() -> None:
    engine, other = Fake(), Changed(1.3)
    p, q = softmax(engine.table.astype(float)), softmax(1.3 * engine.table.astype(float))
    tokens = [text().ids[place // (SIZE - 1) * SIZE + place % (SIZE - 1)] for place in places(text())]
    one = (p * np.log(p / q)).sum(axis=1)[tokens]
    back = (q * np.log(q / p)).sum(axis=1)[tokens]
    found = divergence(expect(engine), Predictions(other, text(), expect(engine)))
    assert found == pytest.approx(np.maximum(one, back), rel=1e-5)


def test_unlikely_tokens_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = divergence(expect(Fake()), Predictions(Changed(1.3), text(), expect(Fake()))).mean()
    monkeypatch.setattr(fidelity, "TOP", 4)
    part = divergence(expect(Fake()), Predictions(Changed(1.3), text(), expect(Fake()))).mean()
    assert whole / 2 < part < whole  # joining outcomes never adds divergence


@pytest.mark.parametrize("power", [0.9, 1.1])
def test_an_engine_unlike_its_weights_is_refused(power: float) -> None:
    found = Predictions(Changed(power), text(), expect(Fake()))
    with pytest.raises(UserError, match="does not calculate what the weights say") as refusal:
        check(expect(Fake()), found, text(), "float32")
    assert f"perplexity {np.exp(found.nll[: 2 * SIZE - 2].mean()):.4g}, due" in str(refusal.value)


@pytest.mark.parametrize(("start", "said"), [(0, 1), (100, 101), (298, 299)])
def test_the_line_says_where_in_a_window_it_begins(start: int, said: int) -> None:
    with pytest.raises(UserError) as refusal:
        check(expect(Fake()), Predictions(Changed(2, start), text(), expect(Fake())), text(), "float32")
    begins = int(str(refusal.value).partition("from position ")[2].split()[0])
    assert 0 <= begins - said <= 2  # every position but some of the 299 is compared


def test_rounding_is_no_fault() -> None:
    class Half(Fake):
        def logits(self, ids: list[int]) -> Iterator[np.ndarray]:
            for chunk in super().logits(ids):
                yield chunk.astype(np.float16).astype(np.float32)

    found = Predictions(Half(), text(), expect(Fake()))
    assert 0 < check(expect(Fake()), found, text(), "float16")["divergence"] < 1e-5


@pytest.mark.parametrize(
    ("compute_type", "other", "rounding", "limit"),
    [
        *(("float32", "float32", 0, 1e-5), ("float32", "float16", 0, 1e-3), ("float16", "float32", 0, 1e-3)),
        *(("bfloat16", "float32", 0, 5e-3), ("something", "float32", 0, 5e-3)),
        *(("int8_float32", "float32", 0.02, 0.04), ("int8_float16", "float16", 0.0001, 1e-3)),
    ],
)
def test_the_tolerance_is_of_both_arithmetics(compute_type: str, other: str, rounding: float, limit: float) -> None:
    assert tolerance(compute_type, other, rounding) == limit


def test_positions_are_spread_over_the_first_two_windows() -> None:
    chosen = places(text())
    assert len(chosen) == 2 * fidelity.PLACES
    assert (chosen[0], chosen[255], chosen[256], chosen[-1]) == (0, SIZE - 2, SIZE - 1, 2 * SIZE - 3)
    assert max(np.diff(chosen)) == 2


def test_what_was_expected_of_another_text_is_refused() -> None:
    with pytest.raises(UserError, match="of other positions"):
        check(expect(Fake()) | {"places": [1]}, Predictions(Fake(), text()), text(), "float32")
