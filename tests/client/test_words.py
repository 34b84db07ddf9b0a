"""Server answers that cannot be true are refused by name, and no fallback believes more than the main
way."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attached_servers import Changed, Told, posts, read
from raw_server import OK, answer, serve
from transcript import Exchange, listen

from quantmill.client import client, stream, words
from quantmill.client.dialects import DIALECTS
from quantmill.client.schedule import Closed
from quantmill.client.target import Target
from quantmill.client.words import Expected, Untrue
from quantmill.common.redaction import Secrets

IDS = [4, 7, 2, 9]
COMPLETIONS = DIALECTS["completions"]


def told(**changes: Any) -> words.Told:
    """Two likeliest tokens of each of three places."""
    values: dict[str, Any] = {
        "logprobs": [-0.5, -3.0, -1.0],
        "top": [[(7, -0.5), (1, -1.5)], [(3, -0.25), (4, -2.0)], [(9, -1.0), (8, -1.0)]],
    }
    return words.Told("prompt_logprobs", **(values | changes))


def test_possible_log_probabilities_are_kept() -> None:
    found = words.targets(told(), IDS, 16, 2)
    assert found.logprobs.tolist() == [-0.5, -3.0, -1.0]
    assert found.top_ids.tolist() == [[7, 1], [3, 4], [9, 8]]
    rounded = words.targets(told(logprobs=[-0.5, -3.0, -0.9995]), IDS, 16, 2)
    assert rounded.logprobs[2] == -0.9995
    # two certain targets are no reason for doubt, and what rounding puts above 0 is 0
    assert words.targets(told(logprobs=[1e-5, 0], top=[[(7, 0.0)], [(2, 0.0)]]), IDS[:3], 16, 2).logprobs.max() == 0


TOP = told().top
LIES = {
    "above 0": ({"logprobs": [-0.5, 5.0, -1.0]}, "holds a log-probability of 5.0, and none is above 0"),
    "all zeros": ({"logprobs": [0.0, 0, -0.0]}, "holds 3 log-probabilities that are all 0"),
    "NaN": ({"logprobs": [-0.5, float("nan"), -1.0]}, "holds nan, which is not a log-probability"),
    "infinity": ({"logprobs": [-0.5, float("-inf"), -1.0]}, "holds -inf, which is not a log-probability"),
    "None": ({"logprobs": [None, -3.0, -1.0]}, "holds None, which is not a log-probability"),
    "a text": ({"logprobs": ["-0.5", -3.0, -1.0]}, "holds '-0.5', which is not a log-probability"),
    "a truth": ({"logprobs": [False, -3.0, -1.0]}, "holds False, which is not a log-probability"),
    "10 ** 400": ({"logprobs": [-(10**400), -3.0, -1.0]}, "which is not a log-probability"),
    "too few": ({"logprobs": [-0.5, -3.0]}, "holds log-probabilities of 2 places, and 3 follow the first of 4"),
    "too many": ({"top": [*TOP, TOP[0]]}, "holds likeliest tokens of 4 places, and 3 follow the first of 4"),
    "too many likeliest": ({"top": [[*TOP[0], (2, -9.0)], *TOP[1:]]}, "holds 3 likeliest tokens of place 1, of 2"),
    "a sum beyond 1": (
        {"top": [[(7, -0.5), (1, -0.5)], *TOP[1:]]},
        "the likeliest tokens of place 1 have probability 1.21",
    ),
    "no order": (
        {"top": [TOP[0], [(4, -2.0), (3, -0.25)], TOP[2]]},
        "the likeliest tokens of place 2 are not in order",
    ),
    "two values": ({"logprobs": [-0.7, -3.0, -1.0]}, "token 7 of place 1 has two log-probabilities, 0.2 nats apart"),
    "ahead of all": ({"logprobs": [-0.5, -0.1, -1.0]}, "token 2 of place 2 is likelier than one of the likeliest"),
    "beyond": (
        {"top": [[(7, -0.5), (16, -1.5)], *TOP[1:]]},
        "it writes token 16, and the artifact's vocabulary has 16",
    ),
    "negative": ({"top": [[(7, -0.5), (-1, -1.5)], *TOP[1:]]}, "it returns token -1, and ids begin at 0"),
    "a truth's id": ({"top": [[(7, -0.5), (True, -1.5)], *TOP[1:]]}, "a token is not a whole number"),
    "a fraction's id": ({"top": [[(7, -0.5), (1.0, -1.5)], *TOP[1:]]}, "a token is not a whole number"),
    "one twice": ({"top": [[(7, -0.5), (7, -0.5)], *TOP[1:]]}, "one token twice at place 1"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_impossible_log_probability_is_refused_by_name(lie: str) -> None:
    changes, message = LIES[lie]
    with pytest.raises(Untrue) as found:
        words.targets(told(**changes), IDS, 16, 2)
    assert str(found.value).startswith("prompt_logprobs")
    assert message in str(found.value)


@pytest.mark.parametrize("key", ["+5", "1_0", " 7", "\uff17", "-1", "1.0"])
def test_keys_are_ids_in_plain_decimals_only(key: str) -> None:
    place = {"7": {"logprob": -0.5, "rank": 1}, key: {"logprob": -2.0, "rank": 2}}
    content = {"choices": [{"prompt_logprobs": [None, place]}]}
    with pytest.raises(Untrue, match="for a token's id"):
        COMPLETIONS.likelihood.read(content, [4, 7])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_json_without_numbers_is_refused(number: str) -> None:
    with pytest.raises(Untrue, match=f"it says {number}, which is not a number"):
        words.parse(f'{{"a": {number}}}'.encode(), Secrets(frozenset()))


def reply(choice: str = '"text": "a", "token_ids": [5]', more: str = "", **expected: Any) -> stream.Reply:
    """Return the reply that an answer over a socket becomes."""
    reason = "" if "finish" in choice else '"finish_reason": "length", '
    body = f'{{"choices": [{{{reason}{choice}}}]{more}}}'.encode()
    with serve(answer(OK + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))) as url:
        target = Target(url, timeout=20.0)
        (exchange,) = client.run(target, [target.request("/", {})], Closed(1)).exchanges
    return stream.read(exchange, COMPLETIONS, None, Expected(**({"vocabulary": 48, "model": "demo"} | expected)))


CLAIMS = {
    "beyond": ('"token_ids": [48]', "", "it writes token 48, and the artifact's vocabulary has 48"),
    "negative": ('"token_ids": [5, -1]', "", "it returns token -1, and ids begin at 0"),
    "a prompt beyond": (
        '"prompt_token_ids": [99]',
        "",
        "it returns prompt token 99, and the artifact's vocabulary has 48",
    ),
    "another model": ("", ', "model": "other"', "it answers as 'other', and was asked for 'demo'"),
    "a count below 0": ("", ', "usage": {"prompt_tokens": -3}', "it counts -3 prompt_tokens"),
    "a count without end": ("", ', "usage": {"completion_tokens": 1' + "0" * 30 + "}", "it counts 1000000"),
    "a long reason": ('"finish_reason": "' + "x" * 300 + '"', "", "its finish reason has 300 characters"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_an_impossible_answer_is_named(claim: str) -> None:
    choice, more, message = CLAIMS[claim]
    found = reply(", ".join(filter(None, ['"text": "a"', choice])), more)
    assert message in found.error
    assert found.untrue and not found.ok


@pytest.mark.parametrize("ids", ["[true]", "[5.0]", '["5"]', "[null]", "[[5]]", '{"5": 5}', '"55"'])
def test_ids_of_another_type_cannot_be_read(ids: str) -> None:
    assert reply(f'"text": "a", "token_ids": {ids}').error.startswith("an answer that cannot be read")


def test_a_models_name_may_have_a_revision() -> None:
    for more in ("", ', "model": "demo"', ', "model": "demo@main"'):
        found = reply(more=more)
        assert (found.ok, found.ids, found.error) == (True, (5,), None)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((4, 2), "it counts 2 tokens so far, after 4, and sent 2"),
        ((2, 2, 2), "it counts 2 tokens so far, after 2, and sent 3"),
        ((2, 2), None),  # a draft of two, counted when it was accepted
    ],
)
def test_wrong_running_counts_are_named(counts: tuple[int, ...], message: str | None) -> None:
    events = [{"content": "a", "tokens": [5], "tokens_predicted": so_far, "stop": False} for so_far in counts]
    body = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
    data = OK + b"Content-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with serve(answer(data)) as url:
        target = Target(url, timeout=20.0)
        (exchange,) = client.run(target, [target.request("/", {})], Closed(1)).exchanges
    found = stream.read(exchange, DIALECTS["llama"])
    assert (found.untrue, found.error) == (message is not None, message)
    assert message or found.tokens == 2


def replaced(old: str, new: str) -> Callable[[Exchange], Exchange]:
    return posts(lambda chunk: chunk.replace(old, new))


FAULTS: dict[str, tuple[str, Callable[[Exchange], Exchange], str]] = {
    "probabilities above 1": (
        "openai-vllm",
        replaced('"logprob":-', '"logprob":'),
        "prompt_logprobs holds a log-probability of ",
    ),
    "no number": (
        "sglang",
        replaced("-6.6657", "NaN"),
        "it says NaN, which is not a number; its probabilities are not",
    ),
    "other ids are scored": (
        "sglang",
        replaced("[-5.3073, 1240, null]", "[-5.3073, 1241, null]"),
        "input_token_logprobs is of other tokens than were sent; its probabilities are not those of this artifact",
    ),
    "another model, by its ids": (
        "openai-vllm",
        replaced('"text":" hu"', '"text":" ab"'),
        "another model is served: its text is not that of its ids by ",
    ),
    "another model, by its name": (
        "openai-vllm",
        replaced('"model":"demo"', '"model":"other"'),
        "another model is served: it answers as 'other', and was asked for 'demo'",
    ),
    "another model, where none is listed": (
        "openai-transformers",
        replaced('"model":"fp16@main"', '"model":"other@main"'),
        "another model is served: it answers as 'other@main', and was asked for 'fp16'",
    ),
    "no name, and none is listed": (
        "openai-transformers",
        replaced('"model":"fp16@main",', ""),
        "it neither lists its models nor names one in an answer, so nothing shows that it serves fp16",
    ),
    "a prompt's tokens where the way is the last": (
        "openai-transformers",
        replaced('"prompt_tokens":14', '"prompt_tokens":12'),
        "it read 12 tokens where 14 were sent",
    ),
    "no usage where the way is the last": (
        "openai-transformers",
        replaced('"prompt_tokens"', '"prompt"'),
        "it returns neither ids nor the number of tokens that it reads and writes (usage)",
    ),
    "more new tokens than came": (
        "openai-vllm",
        replaced('"completion_tokens":8', '"completion_tokens":9'),
        "it counts 9 new tokens where 8 came: its usage is wrong",
    ),
    "a counter that is none": (
        "lmdeploy",
        lambda each: (
            each | {"chunks": ['lmdeploy:prompt_tokens_total{model_name="demo"} NaN\n']}
            if each["path"] == "/metrics"
            else each
        ),
        "/metrics reports lmdeploy:prompt_tokens_total nan, not a count",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_attached_servers_are_checked_against_the_artifact(fault: str, attach: Callable[..., Told]) -> None:
    name, change, message = FAULTS[fault]
    transcript = read(name)
    with listen(Changed(transcript["exchanges"], change)) as url:
        result = attach(transcript["engine"], url, **transcript["options"])
    line = result.stderr.splitlines()[-1]
    assert result.returncode == 1
    assert line.startswith(f"error: {url} (fp16): ")
    assert message in line
    assert "Traceback" not in result.stderr


def test_a_refusal_of_ids_hides_no_other_model(attach: Callable[..., Told]) -> None:
    """It takes ids and tells text alone. Ids prove nothing, so it must count a text as the artifact's does."""

    def said(method: str, path: str, body: Any, headers: dict[str, str]) -> Exchange:
        def tell(content: Any, status: int = 200) -> Exchange:
            return {"status": status, "type": "application/json", "chunks": [json.dumps(content)]}

        if method == "GET":
            return tell({"data": [{"id": "demo"}]})
        text = isinstance(body["prompt"], str)
        count = len(body["prompt"].split()) if text else len(body["prompt"])  # of a tokenizer of words
        choice = {"text": " one two", "finish_reason": "length"}
        usage = {"prompt_tokens": count, "completion_tokens": body["max_tokens"]}
        return tell({"model": "demo", "choices": [choice], "usage": usage})

    with listen(said) as url:
        result = attach("openai", url)
    assert result.returncode == 1
    assert "it read 4 tokens where 9 were sent: it adds or cuts some" in result.stderr


def test_all_bits_of_a_half_precision_softmax_pass() -> None:
    """A server may calculate in bfloat16: its probabilities add up to a little more than 1, and are refused by none."""
    random = np.random.default_rng(5)
    for _ in range(200):
        logits = random.normal(0, 4, (3, 32))
        exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        cut = (exact.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)  # of bfloat16
        order = np.argsort(-cut, axis=1, kind="stable")[:, :20]
        top = [[(int(token), float(row[token])) for token in places] for row, places in zip(cut, order, strict=True)]
        own = [float(row[token]) for row, token in zip(cut, IDS[1:], strict=True)]
        assert words.targets(told(logprobs=own, top=top), IDS, 32, 20).top_ids.shape == (3, 20)
