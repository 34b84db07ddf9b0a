"""What servers tell of a given text: each token's log-probability, and the likeliest ones of each place.

One way of asking a server for it, and of reading its answer, for each API that can.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines import Targets
from serving.vllm_settings import TOP


@dataclass(frozen=True)
class Likelihood:
    """How a server is asked, and what it says.

    Attributes:
        body: of a request: (model, ids of the text).
        read: `Targets` of the answer and the same ids. Raises KeyError, TypeError, IndexError, AttributeError or
            ValueError where it does not hold them.
    """

    body: Callable[[str, list[int]], dict[str, Any]]
    read: Callable[[dict[str, Any], list[int]], Targets]


def _vllm_body(model: str, ids: list[int]) -> dict[str, Any]:
    return {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": TOP}


def _read_vllm(content: dict[str, Any], ids: list[int]) -> Targets:
    places = content["choices"][0]["prompt_logprobs"][1:]
    found = [place[str(token)]["logprob"] for token, place in zip(ids[1:], places, strict=True)]
    # a token that is not among the likeliest is told besides, with its rank
    top = [sorted(place.items(), key=lambda each: each[1]["rank"])[:TOP] for place in places]
    return Targets(
        np.array(found, np.float64),
        np.array([[int(token) for token, _ in place] for place in top]),
        np.array([[each["logprob"] for _, each in place] for place in top], np.float64),
    )


def _sglang_body(model: str, ids: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": 0}
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": TOP}
    return {"input_ids": ids, "sampling_params": sampling, **asked}


def _read_sglang(content: dict[str, Any], ids: list[int]) -> Targets:
    """Entries are (log-probability, id, text); nothing is said of the first token."""
    entries, top = content["meta_info"]["input_token_logprobs"], content["meta_info"]["input_top_logprobs"][1:]
    if [entry[1] for entry in entries] != ids or len(top) != len(ids) - 1:
        raise ValueError("it tells other tokens than were sent")
    return Targets(
        np.array([entry[0] for entry in entries[1:]], np.float64),
        np.array([[entry[1] for entry in place] for place in top], np.int64),
        np.array([[entry[0] for entry in place] for place in top], np.float64),
    )


VLLM = Likelihood(_vllm_body, _read_vllm)
SGLANG = Likelihood(_sglang_body, _read_sglang)
