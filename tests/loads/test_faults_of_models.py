"""A server that answers otherwise than it predicts, or than it did before, is named by its own message."""

import pytest
from study import NEW, OFFLINE, SLOTS, Study, names, prompt

from quantmill.client.checks import LoadRequest
from quantmill.client.schedule import Closed
from quantmill.loads import agreement


def test_ties_are_no_fault() -> None:
    study = Study("ties")
    asked = [LoadRequest(prompt(2000 + place), 3) for place in range(60)]
    _, replies = study.send(asked, Closed(SLOTS))
    parted = [reply.ids != tuple(OFFLINE.decode(asked[reply.number].prompt, 3)) for reply in replies]
    assert 0 < sum(parted) < 60  # there are ties, and the server takes the other token
    assert agreement.check_tokens(replies, [], [each.prompt for each in asked], OFFLINE.behind) == []


def test_findings_give_largest_and_mean_gap() -> None:
    study = Study()
    asked = [LoadRequest(prompt(place), 2) for place in range(2)]
    _, replies = study.send(asked, Closed(1))
    gaps = iter([[0.0, 0.2], [0.02, 0.02]])  # of four tokens one is no tie
    (found,) = agreement.check_tokens(replies, [], [each.prompt for each in asked], lambda *_: next(gaps))
    assert "1 of 2 answers hold tokens up to 0.20 nats behind the likeliest" in found.message
    assert found.message.endswith(" that it predicts itself (0.06 in the mean)")


REPEATS = {
    "prefix_cache": (
        "prefix_cached",
        "the server caches prompts: a prompt whose beginning it has seen takes 50% of the time of a",
    ),
    "answer_cache": ("answers_cached", "the server caches answers: it answers a prompt that it has seen at once"),
    "sampling": ("sampling", "the server samples: 5 of 5 prompts got another answer when they were sent again"),
}


@pytest.mark.parametrize("fault", REPEATS)
def test_kept_prompts_kept_answers_and_sampling_have_names(fault: str) -> None:
    name, message = REPEATS[fault]
    found = Study(fault).alone()
    assert names(found) == {name}
    assert message in found[0].message


def test_one_differing_answer_is_not_sampling() -> None:
    study = Study()
    asked = [LoadRequest(prompt(place), NEW) for place in range(5)]
    first, again = (study.send(asked, Closed(1))[1] for _ in range(2))
    again[2].events[-1] = again[2].events[-1]._replace(ids=(40,), text="other")
    assert agreement.check_repeats(first, again, first) == []
    again[1].events[-1] = again[0].events[-1] = again[2].events[-1]
    assert names(agreement.check_repeats(first, again, first)) == {"sampling"}


def test_what_could_not_be_compared_is_said() -> None:
    study = Study("error")
    _, replies = study.send([LoadRequest(prompt(place), NEW) for place in range(3)], Closed(1))
    (found,) = agreement.check_repeats(replies, replies, replies)
    assert found.message.startswith("no prompt was answered twice (CUDA error: an illegal memory access): what the")
    (note,) = agreement.check_tokens(replies, [], [], OFFLINE.behind)
    assert (note.fault, note.refuses) == ("tokens_not_compared", False)


def test_tokens_that_depend_on_the_batch_are_named() -> None:
    study = Study("batch")
    assert study.alone() == []
    (found,) = study.agree()
    assert found.fault == "batch_dependent"
    assert found.message.startswith("the server's tokens depend on its other requests: 14 of 16 answers")


def test_a_load_is_not_blamed_for_solo_faults() -> None:
    assert Study("speculation").agree() == []
    (found,) = Study("lossy").agree()  # speculation that takes the second token of every seven
    assert (found.fault, found.refuses) == ("unlike_predictions", True)
    assert found.message.startswith(
        "the server's tokens are not those that it predicts, even for one request at a time: 16 of 16 answers "
    )


@pytest.mark.parametrize(("fault", "refuses"), [("batch", False), ("lossy", False), ("other_model", True)])
def test_the_mean_decides_where_a_format_rounds_activations(fault: str, refuses: bool) -> None:
    """One or two second choices of sixteen are within what rounding does, another model's tokens are not."""
    study = Study(fault)
    (found,) = study.agree(rounds=True)
    assert found.refuses == refuses
    mean = float(found.message.split("predicts itself (")[1].split(" in the mean")[0])
    assert (mean > 0.1) == refuses
    assert (found.fault == "tokens_moved") != refuses
    assert names(study.agree(rounds=False))


def test_a_load_beyond_rounding_is_blamed() -> None:
    """Alone some tokens are second choices, as rounding makes them; under load they are another model's."""
    asked = [LoadRequest(prompt(place), NEW) for place in range(8)]
    (_, foreign), (_, alone) = (Study(fault).send(asked, Closed(1)) for fault in ("other_model", "lossy"))
    prompts = [each.prompt for each in asked]
    (found,) = agreement.check_tokens(foreign, alone, prompts, OFFLINE.behind, rounds=True)
    assert found.fault == "batch_dependent"
    (found,) = agreement.check_tokens(foreign, foreign, prompts, OFFLINE.behind, rounds=True)
    assert found.fault == "unlike_predictions"
