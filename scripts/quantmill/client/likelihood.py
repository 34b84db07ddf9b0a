"""What servers tell of a given text: each token's log-probability, and the likeliest ones of each place.

One way of asking a server for it, and of reading its answer, for each API that can.
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
    """How a server is asked, and what it says.

    Attributes:
        body: of a request: (model, ids of the text).
        read: what the answer tells of the same ids, to be checked by `words.targets`; None where it tells nothing of
            the kind. Raises KeyError, TypeError, IndexError or AttributeError where it has another form, `Untrue` where
            it is of other ids.
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
            raise Untrue(f"prompt_logprobs tells nothing of token {token}, which is place {number} of the text")
    # a token that is not among the likeliest is told besides, with its rank
    top = [sorted(place.items(), key=lambda each: each[1]["rank"])[:TOP] for place in found]
    return Told(
        "prompt_logprobs",
        [place[token]["logprob"] for token, place in zip(ids[1:], found, strict=False)] + found[len(ids) - 1 :],
        [[(token, each["logprob"]) for token, each in place] for place in top],
    )


def _number(token: str) -> int:
    """An id that is a key."""
    if not NUMBER.fullmatch(token):
        raise Untrue(f"prompt_logprobs has {token!r:.40} for a token's id")
    return int(token)


def _sglang_body(model: str, ids: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": 0}
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": TOP}
    return {"input_ids": ids, "sampling_params": sampling, **asked}


def _read_sglang(content: dict[str, Any], ids: list[int]) -> Told | None:
    """Entries are (log-probability, id, text); nothing is said of the first token."""
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
