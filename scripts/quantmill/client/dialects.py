"""The APIs of servers, requests and answers, in one table with a few lines for each.

Every body asks for the likeliest token each time, for exactly `new_tokens` of them, and for the counts at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantmill.client.likelihood import SGLANG, VLLM, Likelihood
from quantmill.client.words import Piece, Untrue, Usage

Prompt = str | list[int]


@dataclass(frozen=True)
class Dialect:
    """An API of servers.

    Attributes:
        path: where requests go.
        body: makes the body of a request: (model, prompt, new tokens, whether to stream).
        read: reads one JSON object of the answer, to be checked by `words.check`. Raises KeyError, TypeError,
            IndexError or AttributeError where it is not of this dialect.
        likelihood: asks for the log-probabilities of a given text; None where the API cannot.
    """

    path: str
    body: Callable[[str, Prompt, int, bool], dict[str, Any]]
    read: Callable[[dict[str, Any]], Piece]
    likelihood: Likelihood | None = None


def _completions_body(model: str, prompt: Prompt, new_tokens: int, stream: bool) -> dict[str, Any]:
    return _extended_body(model, prompt, new_tokens, stream) | {"return_token_ids": True}


def _llama_body(model: str, prompt: Prompt, new_tokens: int, stream: bool) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
    return {"prompt": prompt, "n_predict": new_tokens, "return_tokens": True, "stream": stream, **sampling}


def _plain_body(model: str, prompt: Prompt, new_tokens: int, stream: bool) -> dict[str, Any]:
    body = _bare_body(model, prompt, new_tokens, stream)
    return body | ({"stream_options": {"include_usage": True}} if stream else {})


def _bare_body(model: str, prompt: Prompt, new_tokens: int, stream: bool) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": stream}


def _extended_body(model: str, prompt: Prompt, new_tokens: int, stream: bool) -> dict[str, Any]:
    return _plain_body(model, prompt, new_tokens, stream) | {"ignore_eos": True}


def _tgi_body(model: str, prompt: Prompt, new_tokens: int, stream: bool) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {"max_new_tokens": new_tokens, "do_sample": False, "details": True}}


def _sglang_body(model: str, prompt: Prompt, new_tokens: int, stream: bool) -> dict[str, Any]:
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "stream": stream}


def _lmdeploy_body(model: str, prompt: Prompt, new_tokens: int, stream: bool) -> dict[str, Any]:
    sampling = {"max_tokens": new_tokens, "temperature": 0, "top_k": 1, "ignore_eos": True}
    return {"input_ids": prompt, "stream": stream, **sampling}


def _ollama_body(model: str, prompt: Prompt, new_tokens: int, stream: bool) -> dict[str, Any]:
    sampling = {"num_predict": new_tokens, "temperature": 0, "seed": 0}  # raw: without a chat template
    return {"model": model, "prompt": prompt, "raw": True, "stream": stream, "options": sampling}


def _read_completions(content: dict[str, Any]) -> Piece:
    counts, choices = content.get("usage"), content["choices"]
    usage = None
    if counts:
        details = counts.get("prompt_tokens_details") or {}
        usage = Usage(counts.get("prompt_tokens"), counts.get("completion_tokens"), details.get("cached_tokens"))
    if len(choices) > 1:
        raise Untrue(f"it gives {len(choices)} answers to one prompt")
    choice = choices[0] if choices else {}  # the event with the usage has none
    finish = choice.get("finish_reason")
    return Piece(
        ids=choice.get("token_ids"),
        text=choice.get("text") or "",
        finish=finish,
        usage=usage,
        model=content.get("model"),
        prompt_ids=choice.get("prompt_token_ids") or content.get("prompt_token_ids"),
        last=bool(finish and usage),  # transformers serve sends no [DONE]
    )


def _read_llama(content: dict[str, Any]) -> Piece:
    # a token whose text ends inside a character is withheld with its id: only the count shows it
    ids, text, so_far = content.get("tokens"), content["content"], content.get("tokens_predicted")
    stop: str = content.get("stop_type", "")
    if not content["stop"]:
        return Piece(ids, text, so_far)
    return Piece(
        ids,
        text,
        so_far,
        finish=LLAMA_STOPS.get(stop, stop),
        usage=Usage(content.get("tokens_evaluated"), so_far, (content.get("timings") or {}).get("cache_n")),
        model=content.get("model"),
        last=True,
    )


def _read_tgi(content: dict[str, Any]) -> Piece:
    token, details = content["token"], content.get("details")
    return Piece(
        [token["id"]],
        "" if token.get("special") else token["text"],
        finish=details and details["finish_reason"],
        usage=Usage(details.get("input_length"), details["generated_tokens"]) if details else None,
        last=bool(details),
    )


def _read_meta_info(content: dict[str, Any]) -> Piece:
    meta = content["meta_info"]
    so_far, finish = meta["completion_tokens"], meta.get("finish_reason")
    usage = Usage(meta["prompt_tokens"], so_far, meta.get("cached_tokens"))
    return Piece(content.get("output_ids"), content["text"], so_far, finish and finish["type"], usage)


def _read_ollama(content: dict[str, Any]) -> Piece:
    usage = Usage(content.get("prompt_eval_count"), content.get("eval_count")) if content["done"] else None
    return Piece(None, content["response"], finish=content.get("done_reason"), usage=usage, last=content["done"])


LLAMA_STOPS = {"limit": "length", "eos": "stop", "word": "stop"}
DIALECTS = {
    "completions": Dialect("/v1/completions", _completions_body, _read_completions, VLLM),
    "llama": Dialect("/completion", _llama_body, _read_llama),
    "plain": Dialect("/v1/completions", _plain_body, _read_completions),  # OpenAI's own fields only
    "bare": Dialect("/v1/completions", _bare_body, _read_completions),  # usage is not asked for, but returned
    "tgi": Dialect("/generate_stream", _tgi_body, _read_tgi),
    "sglang": Dialect("/generate", _sglang_body, _read_meta_info, SGLANG),
    "lmdeploy": Dialect("/generate", _lmdeploy_body, _read_meta_info),
    "ollama": Dialect("/api/generate", _ollama_body, _read_ollama),
    "extended": Dialect("/v1/completions", _extended_body, _read_completions),  # and `ignore_eos`
    "openvino": Dialect("/v3/completions", _extended_body, _read_completions),
}
