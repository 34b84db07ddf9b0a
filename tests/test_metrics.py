"""Metrics against values computed by hand."""

import math

import numpy as np
import pytest

from metrics import bootstrap, divergence, latency, perplexity


def test_windows_drop_the_tail_and_never_exceed_the_context() -> None:
    assert perplexity.gptq_windows(5000, None) == [(0, 2048), (2048, 4096)]
    assert perplexity.gptq_windows(4096, 4096) == [(0, 2048), (2048, 4096)]
    assert perplexity.gptq_windows(1100, 512) == [(0, 512), (512, 1024)]
    with pytest.raises(ValueError, match="do not fill one window of 512"):
        perplexity.gptq_windows(511, 512)


def test_log_softmax_of_three_logits() -> None:
    logits = np.array([[0.0, math.log(2), math.log(5)]], np.float32)
    assert np.exp(perplexity.log_softmax(logits)) == pytest.approx(np.array([[1 / 8, 2 / 8, 5 / 8]]))


def test_log_softmax_survives_huge_logits() -> None:
    assert perplexity.log_softmax(np.array([[1e30, 0.0]], np.float32)) == pytest.approx(np.array([[0.0, -1e30]]))


def test_perplexity_weighs_windows_by_their_tokens() -> None:
    # 3 tokens of probability 1/2 and 1 of 1/16: (2^3 * 16)^(1/4) = 2^(7/4)
    nll, tokens = np.array([3 * math.log(2), math.log(16)]), np.array([3, 1])
    assert perplexity.perplexity(nll, tokens) == pytest.approx(2 ** (7 / 4))


def test_uniform_guess_has_the_vocabulary_as_perplexity() -> None:
    nll = -perplexity.log_softmax(np.zeros((7, 50)))[:, 3]
    assert perplexity.perplexity(nll, np.ones(7)) == pytest.approx(50)


def test_kl_divergence_by_hand_and_its_direction() -> None:
    reference, candidate = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert divergence.kl_divergence(reference, candidate) == pytest.approx([expected])
    other = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert divergence.kl_divergence(candidate, reference) == pytest.approx([other])
    assert divergence.kl_divergence(reference, reference) == pytest.approx([0.0])


def test_top1_agreement() -> None:
    reference, candidate = np.log([[0.6, 0.4], [0.6, 0.4]]), np.log([[0.9, 0.1], [0.4, 0.6]])
    assert divergence.top1_agreement(reference, candidate).tolist() == [True, False]


def test_bootstrap_interval_of_a_mean_matches_the_normal_one() -> None:
    values = np.random.default_rng(7).normal(10, 2, 400)
    replicates = perplexity.ratio_of_sums(values, np.ones(400), bootstrap.indices(400))
    low, high = bootstrap.interval(replicates)
    half = 1.96 * values.std(ddof=1) / math.sqrt(400)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


def test_bootstrap_draws_the_same_windows_each_time() -> None:
    assert np.array_equal(bootstrap.indices(30), bootstrap.indices(30))


@pytest.mark.parametrize(("freedom", "table"), [(4, 2.776), (9, 2.262), (29, 2.045), (1000, 1.962)])
def test_student_t_against_the_printed_table(freedom: int, table: float) -> None:
    assert bootstrap.student_t(freedom) == pytest.approx(table, rel=0.003)


@pytest.mark.parametrize(("n", "plain_misses", "widened_misses"), [(5, 0.15, 0.14), (20, 0.05, 0.085)])
def test_intervals_of_few_samples_miss_less_often(n: int, plain_misses: float, widened_misses: float) -> None:
    draws = bootstrap.indices(n)
    plain = widened = 0
    for values in np.random.default_rng(11).normal(size=(400, n)):
        means = values[draws].mean(axis=1)
        low, high = bootstrap.interval(means)
        plain += not low <= 0 <= high
        low, high = bootstrap.interval(means, n)
        widened += not low <= 0 <= high
    assert plain / 400 > plain_misses
    assert widened / 400 < widened_misses


def run(process: int, prompt: int, *seconds: float) -> latency.Run:
    return latency.Run(process, 0, prompt, seconds)


def test_ttft_and_tpot_by_hand() -> None:
    one = run(0, 0, 0.5, 0.6, 0.9)
    assert one.ttft == 0.5
    assert one.tpot == pytest.approx(0.2)


def test_throughput_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    rate, low, high = latency.tokens_per_second([run(0, 0, 0.5, 1.0), run(0, 1, 1.0, 9.0)])
    assert rate == pytest.approx(4 / 10)  # the mean of 2/1 and 2/9 would be 1.11
    assert low == pytest.approx(2 / 9)
    assert high == pytest.approx(2.0)


def test_throughput_interval_sees_processes_that_differ() -> None:
    same = [run(p, q, 0.1, 1.0) for p in range(3) for q in range(9)]
    _, low, high = latency.tokens_per_second(same)
    assert low == high == pytest.approx(2.0)
    differing = [run(p, q, 0.1, 1.0 + p) for p in range(3) for q in range(9)]
    _, low, high = latency.tokens_per_second(differing)
    assert low == pytest.approx(2 / 3)
    assert high == pytest.approx(2.0)


def test_summary_is_in_milliseconds() -> None:
    summary = latency.summary([run(0, 0, 0.010, 0.012, 0.014), run(1, 0, 0.010, 0.012, 0.014)])
    assert summary["ttft_ms_p50"] == pytest.approx(10)
    assert summary["tpot_ms_p99"] == pytest.approx(2)
    assert summary["gap_ms_p90"] == pytest.approx(2)
