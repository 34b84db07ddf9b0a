"""The measuring programs' own honesty, with engines whose faults and delays are known."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_engine import VOCAB, Fake

from quantmill import engines
from quantmill.common.program import UserError
from quantmill.engines.head import Head
from quantmill.metrics import divergence, perplexity
from quantmill.quality import teacher_forcing
from quantmill.quality.measure import score, score_reference, score_targets, summarise
from quantmill.quality.reference import Reference, narrow, widen

CONTEXT, TOKENS = 8, 46


@pytest.fixture
def text(tmp_path: Path) -> teacher_forcing.Text:
    ids = np.random.default_rng(3).integers(VOCAB, size=TOKENS).tolist()
    content = {"ids": ids, "context": CONTEXT, "text_sha256": "x", "bytes": 1, "words": 1}
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    return teacher_forcing.read_text(tmp_path / "evaluation.json", "gptq-2048")


@pytest.fixture
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """Keep an engine's predictions: its states, whose logits are exact."""

    def keep(engine: Fake, text: teacher_forcing.Text) -> Reference:
        folder = tmp_path_factory.mktemp("reference") / "kept"
        score_reference(engine, text, folder, "cuda")
        return Reference(folder)

    return keep


def test_scored_positions_predict_the_windows_next_token(text: teacher_forcing.Text, reference: Callable) -> None:
    assert [window[:2] for window in text.windows] == [(0, 8), (8, 16), (16, 24), (24, 32), (32, 40)]
    assert text.positions == 35
    engine = Fake()
    positions = score(engine, text, reference(engine, text))
    log_probabilities = perplexity.log_softmax(engine.table)
    expected = [
        -log_probabilities[text.ids[i], text.ids[i + 1]]
        for start, stop, *_ in text.windows
        for i in range(start, stop - 1)
    ]
    assert positions["nll"] == pytest.approx(expected)
    assert positions["kld"] == pytest.approx(0, abs=1e-12)
    assert positions["top1"].all()


def test_one_chunk_of_logits_exists_at_a_time(text: teacher_forcing.Text, reference: Callable) -> None:
    engine = Fake()
    score(engine, text, reference(Fake(), text))
    assert engine.most_alive == 1


def test_summary_sums_by_window(text: teacher_forcing.Text, reference: Callable) -> None:
    engine = Fake()
    positions = score(engine, text, reference(engine, text))
    result = summarise(positions, text, "gptq-2048")
    windows, summary = result["windows"], result["summary"]
    assert result["headline"] == "token_perplexity"
    assert windows["tokens"] == [7, 7, 7, 7, 7]
    assert sum(windows["nll"]) == pytest.approx(positions["nll"].sum())
    assert summary["perplexity"] == pytest.approx(np.exp(positions["nll"].mean()))
    assert summary["perplexity_low"] <= summary["perplexity"] <= summary["perplexity_high"]
    assert summary["top1_agreement"] == 1


def test_noise_in_the_logits_shows_as_divergence(text: teacher_forcing.Text, reference: Callable) -> None:
    quiet, loud = (score(Fake(noise=noise), text, reference(Fake(), text))["kld"].mean() for noise in (0.1, 1.0))
    assert 0 < quiet < loud / 10


def test_logits_shifted_by_one_position_are_seen(text: teacher_forcing.Text, reference: Callable) -> None:
    shifted = score(Fake(shift=1), text, reference(Fake(), text))
    assert shifted["top1"].mean() < 0.5
    assert shifted["kld"].mean() > 1


def test_too_few_positions_are_refused(text: teacher_forcing.Text, reference: Callable) -> None:
    with pytest.raises(UserError, match="window 0: the engine returned logits of 5 positions, not 7"):
        score(Fake(drop=3), text, reference(Fake(), text))


def test_logits_that_are_no_numbers_are_refused(text: teacher_forcing.Text, reference: Callable) -> None:
    broken = Fake()
    broken.table[:] = np.nan
    with pytest.raises(UserError, match="not finite"):
        score(broken, text, reference(Fake(), text))


def test_a_reference_of_another_text_is_refused(text: teacher_forcing.Text, reference: Callable) -> None:
    with pytest.raises(UserError, match="of 35 positions, not 28"):
        score(Fake(), text.first(4), reference(Fake(), text))


def test_a_padded_vocabulary_takes_no_part(text: teacher_forcing.Text, reference: Callable) -> None:
    padded = Fake()
    padded.table = np.pad(padded.table, ((0, 0), (0, 3)), constant_values=50)
    assert score(padded, text, reference(Fake(), text))["kld"] == pytest.approx(0, abs=1e-12)


def test_a_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    content = {"ids": [1] * 7, "context": CONTEXT, "text_sha256": "x", "bytes": 1, "words": 1}
    (tmp_path / "short.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="7 tokens do not fill one window of 8"):
        teacher_forcing.read_text(tmp_path / "short.json", "gptq-2048")


def test_too_few_windows_for_an_interval_are_refused(tmp_path: Path) -> None:
    content = {"ids": [1] * 39, "context": CONTEXT, "text_sha256": "x", "bytes": 1, "words": 1}
    (tmp_path / "few.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="fills 4 windows of 8 tokens, and an interval needs 5"):
        teacher_forcing.read_text(tmp_path / "few.json", "gptq-2048")


def evaluation(folder: Path, protocol: str, **changes: object) -> teacher_forcing.Text:
    """Return a text of `TOKENS` random ids, cut by a protocol."""
    ids = np.random.default_rng(3).integers(1, VOCAB, size=TOKENS).tolist()
    content = {"ids": ids, "context": CONTEXT, "text_sha256": "x", "bytes": 90, "words": 20, "bos_id": 0}
    (folder / "evaluation.json").write_text(json.dumps(content | changes))
    return teacher_forcing.read_text(folder / "evaluation.json", protocol)


def nll(before: int, after: int) -> float:
    """Of one token after another, by the engine's own table."""
    return -perplexity.log_softmax(Fake().table)[before, after]


def test_llamacpp_reads_bos_and_scores_second_halves(tmp_path: Path, reference: Callable) -> None:
    text = evaluation(tmp_path, "llamacpp-512")
    seen: list[list[int]] = []

    class Watched(Fake):
        def logits(self, ids: list[int]) -> Iterator[np.ndarray]:
            seen.append(ids)
            yield from super().logits(ids)

    positions = score(Watched(), text, reference(Fake(), text))
    assert seen == [[0, *text.ids[start + 1 : start + 8]] for start in range(0, 40, 8)]
    expected = [nll(text.ids[s + i], text.ids[s + i + 1]) for s in range(0, 40, 8) for i in (4, 5, 6)]
    assert positions["nll"] == pytest.approx(expected)
    summary = summarise(positions, text, "llamacpp-512")["summary"]
    assert summary["perplexity"] == pytest.approx(np.exp(np.mean(expected)))
    error = np.sqrt((np.square(expected).mean() - np.mean(expected) ** 2) / 14) * np.exp(np.mean(expected))
    assert summary["perplexity_standard_error"] == pytest.approx(error)


def test_llamacpp_keeps_the_first_token_without_bos(tmp_path: Path) -> None:
    assert evaluation(tmp_path, "llamacpp-512", bos_id=None).bos is None
    assert evaluation(tmp_path, "gptq-2048").bos is None


def test_hf_strided_scores_all_but_the_first(tmp_path: Path, reference: Callable) -> None:
    text = evaluation(tmp_path, "hf-strided")
    positions = score(Fake(), text, reference(Fake(), text))
    assert positions["nll"] == pytest.approx([nll(text.ids[i], text.ids[i + 1]) for i in range(TOKENS - 1)])


def test_lm_eval_divides_by_words_within_documents(tmp_path: Path, reference: Callable) -> None:
    documents = [
        {"ids": [1, 2, 3], "words": 2, "bytes": 9},
        {"ids": [], "words": 5, "bytes": 1},
        {"ids": list(range(1, 11)) * 3, "words": 15, "bytes": 80},
    ]
    text = evaluation(tmp_path, "lm-eval-word", prefix_id=0, documents=documents, detokenizer=None)
    assert [window.last - window.first for window in text.windows] == [3, 8, 8, 8, 6]
    positions = score(Fake(), text, reference(Fake(), text))
    expected = [
        nll(before, after)
        for document in documents
        for before, after in zip([0, *document["ids"]], document["ids"], strict=False)
    ]
    assert positions["nll"] == pytest.approx(expected)
    result = summarise(positions, text, "lm-eval-word")
    assert result["summary"]["perplexity"] == pytest.approx(np.exp(sum(expected) / 17))
    assert result["normalised"]["word_perplexity"] == pytest.approx(result["summary"]["perplexity"])
    assert result["normalised"]["bits_per_byte"] == pytest.approx(sum(expected) / 89 / np.log(2))
    assert result["headline"] == "word_perplexity"
    assert {name: result[name] for name in ("tokens", "words", "bytes", "scored_tokens")} == {
        "tokens": 33,
        "words": 17,
        "bytes": 89,
        "scored_tokens": 33,
    }
    assert sum(result["windows"]["counts"]) == pytest.approx(17)


class Teller(Fake):
    """Tells what the logits of its table give of the targets and of the `top` likeliest tokens."""

    capabilities = frozenset({"target_logprobs"})
    top = 0

    def target_logprobs(self, ids: list[int]) -> engines.Targets:
        rows = perplexity.log_softmax(self.table)[ids[:-1]]
        likeliest = np.argsort(-rows, axis=1)[:, : self.top]
        return engines.Targets(
            rows[np.arange(len(rows)), ids[1:]], likeliest, np.take_along_axis(rows, likeliest, axis=1)
        )


@pytest.mark.parametrize("protocol", ["gptq-2048", "llamacpp-512", "hf-strided", "lm-eval-word"])
def test_target_log_probabilities_give_the_same_perplexity(tmp_path: Path, protocol: str, reference: Callable) -> None:
    documents = [{"ids": list(range(1, 11)) * 5, "words": 15, "bytes": 80}]
    changes = {"prefix_id": 0, "documents": documents, "detokenizer": None} if protocol == "lm-eval-word" else {}
    text = evaluation(tmp_path, protocol, **changes)
    whole, found = score(Fake(), text, reference(Fake(), text)), score_targets(Teller(), text, reference(Fake(), text))
    assert found["window"].tolist() == whole["window"].tolist()
    assert found["nll"] == pytest.approx(whole["nll"])
    figures, expected = (summarise(each, text, protocol)["summary"] for each in (found, whole))
    assert figures["perplexity"] == pytest.approx(expected["perplexity"])
    assert figures["delta_p_rms"] == pytest.approx(expected["delta_p_rms"], abs=1e-12)
    assert {figures[name] for name in (*divergence.FIGURES, "kld_mean_low") if name != "delta_p_rms"} == {None}


@pytest.mark.parametrize("top", [1, 2, VOCAB - 1])
def test_likeliest_tokens_bound_the_divergence_below(text: teacher_forcing.Text, top: int, reference: Callable) -> None:
    """With all but one of the vocabulary it is the divergence itself."""
    engine, other = Fake(), Teller()
    other.table = engine.table + np.random.default_rng(5).normal(size=engine.table.shape).astype(np.float32)
    other.top = top
    told = score_targets(other, text, reference(engine, text))
    whole = score(other, text, reference(engine, text))
    assert (told["kld_lower_bound"] <= whole["kld"] + 1e-7).all()  # `divergence.measure` has float32 exponentials
    assert told["kld_lower_bound"].mean() > 0.2 * whole["kld"].mean()
    if top == VOCAB - 1:
        assert told["kld_lower_bound"] == pytest.approx(whole["kld"], abs=1e-7)
    assert told["top1"].tolist() == whole["top1"].tolist()
    figures = summarise(told, text, "gptq-2048")["summary"]
    assert figures["kld_lower_bound"] == pytest.approx(told["kld_lower_bound"].mean())
    assert figures["top1_agreement"] == whole["top1"].mean()
    assert figures["kld_mean"] is None


def test_lm_eval_wants_a_token_before_a_document(tmp_path: Path) -> None:
    documents = [{"ids": [1] * 40, "words": 1, "bytes": 1}]
    with pytest.raises(UserError, match="needs a token before each document"):
        evaluation(tmp_path, "lm-eval-word", prefix_id=None, documents=documents, detokenizer=None)


@pytest.mark.parametrize(("keep", "need"), [("logits", 35 * VOCAB * 2), ("auto", 35 * VOCAB * 4 + VOCAB * VOCAB * 4)])
def test_a_small_disk_is_refused_before_writing(
    text: teacher_forcing.Text,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep: str,
    need: int,
    reference: Callable,
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: argparse.Namespace(free=need - 1))
    with pytest.raises(UserError, match="free some disk, or score a shorter evaluation text"):
        score_reference(Fake(), text, tmp_path / "kept", "cuda", keep)
    assert not [*tmp_path.glob("*kept*")]
    monkeypatch.setattr("shutil.disk_usage", lambda _: argparse.Namespace(free=need))
    own = score_reference(Fake(), text, tmp_path / "kept", "cuda", keep)
    kept = Reference(tmp_path / "kept")
    assert (kept.positions, kept.vocab_size) == (35, VOCAB)
    rows = kept.rows(35, np.empty(0))
    rows = rows - rows.max(axis=1, keepdims=True)
    expected = Fake().table[text.ids[0]]
    assert rows[0] == pytest.approx(expected - expected.max(), abs=0.02 if keep == "logits" else 1e-6)
    assert own["nll"] == pytest.approx(score(Fake(), text, Reference(tmp_path / "kept"))["nll"], rel=1e-12)
    assert not own["kld"].any() and not own["delta_p"].any() and own["top1"].all()


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.0, 3.0), (2.0, 5.0)])
@pytest.mark.parametrize("bias", [None, np.arange(VOCAB, dtype=np.float32)])
def test_a_head_may_have_bias_scale_and_cap(
    text: teacher_forcing.Text,
    tmp_path: Path,
    scale: float,
    cap: float | None,
    bias: np.ndarray | None,
    reference: Callable,
) -> None:
    table = Fake().table

    class Capped(Fake):
        def head(self, ids: list[int]) -> Head:
            return Head(table.T, bias, scale, cap)

    score_reference(Capped(), text, tmp_path / "kept", "cuda")
    rows = Reference(tmp_path / "kept").rows(7, np.empty(0))
    expected = scale * (table[text.ids[:7]].astype(float) + (0 if bias is None else bias))
    assert rows == pytest.approx(expected if cap is None else cap * np.tanh(expected / cap), rel=1e-5)


@pytest.mark.parametrize("sizes", [[35], [1] * 35, [20, 4, 11], [2, 31, 2]])
def test_rows_are_the_next_ones_whatever_is_asked(
    text: teacher_forcing.Text, monkeypatch: pytest.MonkeyPatch, sizes: list[int], reference: Callable
) -> None:
    monkeypatch.setattr("quantmill.engines.chunk_positions", lambda vocab, device="cpu": 6)
    kept = reference(Fake(), text)
    rows = np.concatenate([kept.rows(size, np.empty(0)).copy() for size in sizes])
    read = [text.ids[place] for window in text.windows for place in range(window.first - 1, window.last - 1)]
    assert np.array_equal(rows, Fake().table[read])
    with pytest.raises(UserError, match="are damaged; build them again"):
        kept.rows(1, np.empty(0))


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"positions": 35}', '{"positions": 34, "vocab_size": 11}'])
def test_a_damaged_reference_is_one_line(
    text: teacher_forcing.Text, tmp_path: Path, damage: str, reference: Callable
) -> None:
    score_reference(Fake(), text, tmp_path / "kept", "cpu")
    (tmp_path / "kept/reference.json").write_text(damage)
    with pytest.raises(UserError, match=r"kept: the reference's predictions are damaged; build them again$"):
        Reference(tmp_path / "kept")


def test_masked_tokens_diverge_finitely() -> None:
    masked = np.array([[2.0, -np.inf, 1.0], [2.0, np.finfo(np.float32).min, 1.0]], np.float32)
    kept = narrow(masked)
    assert kept.tolist() == [[0, -65504, -1]] * 2
    found = divergence.measure(masked[1:], kept[1:], np.array([0]))
    assert found["kld"] == pytest.approx(0, abs=1e-6)


def test_float16_is_widened_exactly() -> None:
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values) & (values <= 0)]
    assert len(values) == 31745
    assert np.array_equal(widen(values, np.empty(len(values), np.float32)), values.astype(np.float32))
    assert np.exp(widen(np.array([-np.inf], np.float16), np.empty(1, np.float32))) == 0
