"""Metrics against values computed by hand."""

import math

import numpy as np
import pytest

from quantmill.metrics import bootstrap, divergence, latency, perplexity, windows


def test_gptq_windows_drop_the_tail() -> None:
    assert windows.gptq_2048(5000, None) == [(0, 2048, 1, 2048), (2048, 4096, 2049, 4096)]
    assert windows.gptq_2048(4096, 4096) == [(0, 2048, 1, 2048), (2048, 4096, 2049, 4096)]
    assert windows.gptq_2048(1100, 512) == [(0, 512, 1, 512), (512, 1024, 513, 1024)]
    with pytest.raises(ValueError, match="do not fill one window of 512"):
        windows.gptq_2048(511, 512)


def test_llamacpp_scores_second_halves_of_512() -> None:
    # llama-perplexity: logits from position n_ctx / 2 on, n_ctx - 1 - n_ctx / 2 = 255 of them, and the tail dropped
    assert windows.llamacpp_512(1300, 4096) == [(0, 512, 257, 512), (512, 1024, 769, 1024)]
    assert all(window.last - window.first == 255 for window in windows.llamacpp_512(100_000, None))
    assert windows.llamacpp_512(20, 8) == [(0, 8, 5, 8), (8, 16, 13, 16)]


def test_hf_strided_scores_each_token_once() -> None:
    # transformers' documentation of GPT-2: windows of 1024, a stride of 512
    assert windows.hf_strided(2200, 1024) == [
        *((0, 1024, 1, 1024), (512, 1536, 1024, 1536), (1024, 2048, 1536, 2048), (1536, 2200, 2048, 2200)),
    ]
    for tokens, context in ((5, 1024), (1024, 1024), (1025, 1024), (3000, 700), (999, 8), (20_000, 131_072)):
        found = windows.hf_strided(tokens, context)
        assert [i for window in found for i in range(window.first, window.last)] == list(range(1, tokens))
        assert all(window.start < window.first and window.stop - window.start <= context for window in found)


def test_lm_eval_scores_each_token_with_full_context() -> None:
    # the prefix and ten tokens, a context of four: [P 0 1 2]->0123, [3 4 5 6]->4567, and the last two after [5 6 7 8]
    assert windows.lm_eval_word(11, 4) == [(0, 4, 1, 5), (4, 8, 5, 9), (6, 10, 9, 11)]
    assert windows.lm_eval_word(3, 4) == [(0, 2, 1, 3)]
    assert windows.lm_eval_word(5, 4) == [(0, 4, 1, 5)]
    assert windows.lm_eval_word(6, 4) == [(0, 4, 1, 5), (1, 5, 5, 6)]


def test_log_softmax_of_three_logits() -> None:
    logits = np.array([[0.0, math.log(2), math.log(5)]], np.float32)
    assert np.exp(perplexity.log_softmax(logits)) == pytest.approx(np.array([[1 / 8, 2 / 8, 5 / 8]]))


def test_log_softmax_survives_huge_logits() -> None:
    assert perplexity.log_softmax(np.array([[1e30, 0.0]], np.float32)) == pytest.approx(np.array([[0.0, -1e30]]))


def test_perplexity_weighs_windows_by_their_tokens() -> None:
    # 3 tokens of probability 1/2 and 1 of 1/16: (2^3 * 16)^(1/4) = 2^(7/4)
    nll, tokens = np.array([3 * math.log(2), math.log(16)]), np.array([3, 1])
    assert perplexity.perplexity(nll, tokens) == pytest.approx(2 ** (7 / 4))


def test_one_total_gives_every_figure() -> None:
    # 8 tokens of half a bit each in 4 words of 16 bytes
    figures = perplexity.normalise(math.log(2) / 2, 8, 4, 16)
    assert figures == pytest.approx(
        {
            "token_perplexity": math.sqrt(2),
            "word_perplexity": 2,
            "byte_perplexity": 2 ** (1 / 4),
            "bits_per_byte": 1 / 4,
        }
    )


def test_standard_error_as_llama_perplexity_prints_it() -> None:
    # NLLs 1 and 3: mean 2, mean of squares 5, so sqrt((5 - 4) / (2 - 1)) times e squared
    assert perplexity.standard_error(np.array([1.0, 3.0])) == pytest.approx(math.exp(2))


def test_paired_difference_sees_what_all_windows_share() -> None:
    reference = np.array([100.0, 150.0, 90.0, 200.0, 120.0, 80.0])
    tokens = np.full(6, 50)
    difference, low, high, tie = perplexity.paired_difference(reference + 1, reference, tokens)
    assert difference == low == high == pytest.approx(1 / 50)
    assert not tie
    wobble = np.array([1.0, -1.0, 2.0, -2.0, 1.0, -1.0])
    difference, low, high, tie = perplexity.paired_difference(reference + wobble, reference, tokens)
    assert difference == 0
    assert low < 0 < high
    assert tie


def test_uniform_guess_has_the_vocabulary_as_perplexity() -> None:
    nll = -perplexity.log_softmax(np.zeros((7, 50)))[:, 3]
    assert perplexity.perplexity(nll, np.ones(7)) == pytest.approx(50)


def diverge(reference: list[float], candidate: list[float], target: int = 0) -> dict[str, float]:
    """One position, of two distributions."""
    found = divergence.measure(np.log([candidate]), np.log([reference]) + 7.0, np.array([target]))
    return {name: values.item() for name, values in found.items()}


def test_kl_divergence_by_hand_and_its_direction() -> None:
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert diverge([0.5, 0.5], [0.25, 0.75])["kld"] == pytest.approx(expected)
    other = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert diverge([0.25, 0.75], [0.5, 0.5])["kld"] == pytest.approx(other)
    assert diverge([0.5, 0.5], [0.5, 0.5])["kld"] == pytest.approx(0, abs=1e-15)


def test_nll_and_delta_p_of_the_target() -> None:
    found = diverge([0.5, 0.5], [0.25, 0.75], target=1)
    assert found["nll"] == pytest.approx(math.log(4 / 3))
    assert found["delta_p"] == pytest.approx(0.25)
    assert diverge([0.5, 0.5], [0.25, 0.75])["delta_p"] == pytest.approx(-0.25)


def test_top1_agreement() -> None:
    assert diverge([0.6, 0.4], [0.9, 0.1])["top1"]
    assert not diverge([0.6, 0.4], [0.4, 0.6])["top1"]


def test_divergence_follows_its_definition_on_random_logits() -> None:
    candidate, reference = np.random.default_rng(2).normal(0, 3, (2, 50, 97)).astype(np.float32)
    p, q = perplexity.log_softmax(reference), perplexity.log_softmax(candidate)
    kept = candidate.copy()
    found = divergence.measure(candidate, reference.astype(np.float16), np.arange(50))
    assert np.array_equal(candidate, kept)
    work = np.full((3, 60, 97), np.nan, np.float32)  # memory that holds something else, and more of it
    again = divergence.measure(candidate, reference.astype(np.float16), np.arange(50), work=work)
    assert all(np.array_equal(again[name], values) for name, values in found.items())
    assert found["kld"] == pytest.approx((np.exp(p) * (p - q)).sum(axis=-1), rel=5e-3)  # float16
    assert divergence.measure(candidate, reference, np.arange(50))["kld"] == pytest.approx(
        (np.exp(p) * (p - q)).sum(axis=-1), abs=1e-6
    )
    assert found["nll"] == pytest.approx(perplexity.nll(q, np.arange(50)), abs=1e-6)
    same = divergence.measure(candidate, candidate, np.arange(50))
    assert not same["kld"].any() and not same["delta_p"].any() and same["top1"].all()  # exactly


def test_summary_of_divergence_by_hand() -> None:
    kld, delta_p = np.arange(1001) / 1000, np.array([0.3, -0.4])
    summary = divergence.summary(kld, delta_p, np.array([True, False, True, True]))
    assert summary == pytest.approx(
        {
            "kld_mean": 0.5,
            "kld_median": 0.5,
            "kld_p99": 0.99,
            "kld_p999": 0.999,
            "kld_max": 1.0,
            "delta_p_rms": math.sqrt(0.125),
            "top1_agreement": 0.75,
        }
    )


def test_the_bootstrap_interval_matches_the_normal_one() -> None:
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


def run(process: int, prompt: int, *seconds: float) -> latency.Sample:
    return latency.Sample(process, 0, prompt, seconds)


def test_ttft_and_tpot_by_hand() -> None:
    one = run(0, 0, 0.5, 0.6, 0.9)
    assert one.ttft == 0.5
    assert one.tpot == pytest.approx(0.2)


def test_throughput_is_a_ratio_of_sums() -> None:
    rate, low, high = latency.tokens_per_second([run(0, 0, 0.5, 1.0), run(0, 1, 1.0, 9.0)])
    assert rate == pytest.approx(4 / 10)  # the mean of 2/1 and 2/9 would be 1.11
    assert low < rate < high


def test_throughput_interval_sees_processes_that_differ() -> None:
    same = [run(p, q, 0.1, 1.0) for p in range(3) for q in range(9)]
    _, low, high = latency.tokens_per_second(same)
    assert low == high == pytest.approx(2.0)
    differing = [run(p, q, 0.1, 1.0 + p) for p in range(3) for q in range(9)]
    _, low, high = latency.tokens_per_second(differing)
    # means of 1, 2 and 3 s: their standard error is 0.5 / 3 ** 0.5 of the mean, and t is 4.303; the fastest took 1 s
    half = 4.303 * 0.5 / math.sqrt(3)
    assert low == pytest.approx(1 / math.exp(half), rel=1e-3)
    assert high == pytest.approx(2 * math.exp(half), rel=1e-3)


def test_summary_is_in_milliseconds() -> None:
    summary = latency.summary([run(0, 0, 0.010, 0.012, 0.014), run(1, 0, 0.010, 0.012, 0.014)])
    assert summary["ttft_ms_p50"] == pytest.approx(10)
    assert summary["tpot_ms_p99"] == pytest.approx(2)
    assert summary["itl_ms_p90"] == pytest.approx(2)


def test_a_text_without_spaces_has_no_word_perplexity() -> None:
    found = perplexity.normalise(2.4, tokens=3000, words=10, size=9000)  # exp(720)
    assert found["word_perplexity"] is None
    assert found["token_perplexity"] == pytest.approx(math.exp(2.4))
    with pytest.raises(OverflowError, match=r"perplexity is exp\(720\), which is too large"):
        perplexity.perplexity(np.array([7200.0]), np.array([10.0]))


@pytest.mark.parametrize(("processes", "repeats"), [(2, 2), (3, 3), (5, 3)])
def test_intervals_of_few_processes_have_their_coverage(processes: int, repeats: int) -> None:
    random, studies, prompts = np.random.default_rng(0), 400, 9
    found = 0
    for _ in range(studies):  # processes differ by 5%, prompts by 2%, and runs by 3%
        speeds = 1 + random.normal(0, 0.05, (processes, 1, 1)) + random.normal(0, 0.02, (1, prompts, 1))
        seconds = speeds + random.normal(0, 0.03, (processes, prompts, repeats))
        runs = [latency.Sample(i, k, j, (0.01, float(seconds[i, j, k]))) for i, j, k in np.ndindex(seconds.shape)]
        _, low, high = latency.tokens_per_second(runs)
        found += low <= 2 <= high
    assert found / studies >= 0.93


def test_students_t_of_the_tables() -> None:
    """Points of 1, 2, 3, 4, 10 and 30 degrees of freedom, as printed everywhere."""
    printed = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 10: 2.228, 30: 2.042}
    assert {each: bootstrap.student_t(each) for each in printed} == pytest.approx(printed, rel=4e-3)
