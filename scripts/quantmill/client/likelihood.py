"""Log-probabilities of a given text by servers: of each token, and of the likeliest tokens of each place.

Each API that has them has a request, and a function that reads the answer.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantmill.client.words import Told, Untrue

NUMBER = re.compile(r"0|[1-9][0-9]*")

TOP = 20  # likeliest tokens of each place: vLLM's own limit


@dataclass(frozen=True)
class Likelihood:
    """Ask a server for log-probabilities, and read its answer.

    Attributes:
        body: makes the body of a request: (model, ids of the text).
        read: reads the answer about the same ids, to be checked by `words.targets`; None where it holds no
            log-probabilities. Raises KeyError, TypeError, IndexError or AttributeError where it has another form,
            `Untrue` where it is about other ids.
    """

    body: Callable[[str, list[int]], dict[str, Any]]
    read: Callable[[dict[str, Any], list[int]], Told | None]


def _vllm_body(model: str, ids: list[int]) -> dict[str, Any]:
    return {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": TOP}


def _read_vllm(content: dict[str, Any], ids: list[int]) -> Told | None:
    places = content["choices"][0].get("prompt_logprobs")
    if places is None:
        return None
    found = [{_number(token): each for token, each in place.items()} for place in places[1:]]
    for number, (token, place) in enumerate(zip(ids[1:], found, strict=False), 1):
        if token not in place:
            raise Untrue(f"prompt_logprobs has nothing about token {token}, which is place {number} of the text")
    # a token that is not among the likeliest is added with its rank
    top = [sorted(place.items(), key=lambda each: each[1]["rank"])[:TOP] for place in found]
    return Told(
        "prompt_logprobs",
        [place[token]["logprob"] for token, place in zip(ids[1:], found, strict=False)] + found[len(ids) - 1 :],
        [[(token, each["logprob"]) for token, each in place] for place in top],
    )


def _number(token: str) -> int:
    """Return an id that is a key."""
    if not NUMBER.fullmatch(token):
        raise Untrue(f"prompt_logprobs has {token!r:.40} for a token's id")
    return int(token)


def _sglang_body(model: str, ids: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": 0}
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": TOP}
    return {"input_ids": ids, "sampling_params": sampling, **asked}


def _read_sglang(content: dict[str, Any], ids: list[int]) -> Told | None:
    """Read entries of (log-probability, id, text); the first token has none."""
    meta = content["meta_info"]
    entries, top = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
    if entries is None or top is None:
        return None
    if [entry[1] for entry in entries] != ids:
        raise Untrue("input_token_logprobs is of other tokens than were sent")
    return Told(
        "input_token_logprobs",
        [entry[0] for entry in entries[1:]],
        [[(entry[1], entry[0]) for entry in place] for place in top[1:]],
    )


VLLM = Likelihood(_vllm_body, _read_vllm)
SGLANG = Likelihood(_sglang_body, _read_sglang)
