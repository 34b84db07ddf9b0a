"""Another model, or one that answers otherwise than it does offline, is named by its own message."""

import numpy as np
import pytest
from fake_server import Server
from study import NEW, OFFLINE, SLOTS, Study, names, prompt
from timeline import Engine
from virtual import Loop

from serving import agreement
from serving.checks import Asked
from serving.schedule import Closed


def test_ties_are_no_fault() -> None:
    study = Study("ties")
    asked = [Asked(prompt(2000 + place), 3) for place in range(60)]
    _, replies = study.send(asked, Closed(SLOTS))
    offline = [OFFLINE.decode(each.prompt, 3) for each in asked]
    share = agreement.tokens_equal(replies, offline)
    assert 0 < share < 1  # there are ties, and the server takes the other token
    assert agreement.check_tokens(replies, [each.prompt for each in asked], OFFLINE.behind, "load") == []


def test_the_gaps_of_all_tokens_are_told_by_their_largest_and_their_mean() -> None:
    study = Study()
    asked = [Asked(prompt(place), 2) for place in range(2)]
    _, replies = study.send(asked, Closed(1))
    gaps = iter([[0.0, 0.2], [0.02, 0.02]])  # of four tokens one is no tie
    (found,) = agreement.check_tokens(replies, [each.prompt for each in asked], lambda *_: next(gaps), "load")
    assert "1 of 2 answers hold tokens up to 0.20 nats behind the likeliest offline (0.06 in the mean)" in found.message


REPEATS = {
    "prefix_cache": (
        "prefix_cached",
        "the server keeps prompts: one whose beginning it has seen takes 50% of the time of a",
    ),
    "answer_cache": ("answers_cached", "the server keeps answers: a prompt that it has seen is answered at once"),
    "sampling": ("sampling", "the server samples: 5 of 5 prompts were answered otherwise when they were sent again"),
    "other_model": ("other_model", "another model or quantization is served: 5 of 5 answers hold tokens up to"),
    "quantized": ("other_model", "another model or quantization is served"),
}


@pytest.mark.parametrize("fault", REPEATS)
def test_a_fault_that_no_answer_shows_alone_is_named(fault: str) -> None:
    name, message = REPEATS[fault]
    found = Study(fault).alone()
    assert names(found) == {name}
    assert message in found[0].message


@pytest.mark.parametrize(
    ("fault", "name"), [("bos", "a_token_before_the_prompt"), ("left_cut", "a_prompt_cut_on_the_left")]
)
def test_a_server_that_hides_what_it_read_is_found_by_its_tokens(fault: str, name: str) -> None:
    study = Study(fault, "quiet")
    assert names(study.load()) == set()
    found = study.alone()
    assert names(found) == {name}
    assert f"and none if {name.replace('_', ' ')} is assumed" in found[0].message


def test_an_answer_in_a_few_that_differs_is_no_sampling() -> None:
    study = Study()
    asked = [Asked(prompt(place), NEW) for place in range(5)]
    first, again = (study.send(asked, Closed(1))[1] for _ in range(2))
    again[2].events[-1] = again[2].events[-1]._replace(ids=(40,), text="other")
    assert agreement.check_repeats(first, again, first) == []
    again[1].events[-1] = again[0].events[-1] = again[2].events[-1]
    assert names(agreement.check_repeats(first, again, first)) == {"sampling"}


def test_what_could_not_be_compared_is_said() -> None:
    study = Study("error")
    _, replies = study.send([Asked(prompt(place), NEW) for place in range(3)], Closed(1))
    (found,) = agreement.check_repeats(replies, replies, replies)
    assert found.message.startswith("no prompt was answered twice (CUDA error: an illegal memory access): what the")
    (note,) = agreement.check_tokens(replies, [], OFFLINE.behind, "load")
    assert (note.fault, note.refuses) == ("tokens_not_compared", False)


def test_tokens_that_depend_on_the_batch_are_named() -> None:
    study = Study("batch")
    assert study.alone() == []
    (found,) = study.agree("load")
    assert found.fault == "batch_dependent"
    assert found.message.startswith("the server's tokens depend on what else it answers at the time: 14 of 16 answers")


def test_speculation_that_changes_tokens_is_named() -> None:
    assert Study("speculation").agree("speculation") == []
    (found,) = Study("lossy").agree("speculation")
    assert found.fault == "lossy_speculation"
    assert found.message.startswith("speculation changes the tokens: 16 of 16 answers hold tokens up to")


LOGPROBS = {
    None: None,
    "logprobs_none": ("logprobs_missing", "90 of 90 log-probabilities of prompts are missing"),
    "logprobs_shifted": ("logprobs_shifted", "the log-probabilities are those of the place beside"),
    "logprobs_stale": ("logprobs_stale", "the log-probabilities are those of the text before"),
    "logprobs_temperature": ("logprobs_temperature", "the log-probabilities are those of temperature 0.70"),
    "other_model": ("other_model", "from the engine's own: another model or quantization is served"),
    "quantized": ("other_model", "from the engine's own: another model or quantization is served"),
}


@pytest.mark.parametrize("fault", LOGPROBS)
def test_log_probabilities_that_are_not_the_models_are_named(fault: str | None) -> None:
    server = Server(Engine(Loop()), (fault,) if fault else ())
    texts = [prompt(place, 31) for place in range(3)]
    told = [server.prompt_logprobs(ids)[1:] for ids in texts]
    found = agreement.check_logprobs(told, texts, lambda ids: np.array(OFFLINE.rows(ids)))
    expected = LOGPROBS[fault]
    assert names(found) == ({expected[0]} if expected else set())
    assert not expected or expected[1] in found[0].message
