"""The protocols of perplexity: windows of a text, and the scored tokens of each.

The same float16 model is published with "WikiText perplexities" from 5.1 to 12.2: the protocol is part of the number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

CONTEXT = 2048  # of a model whose config has none
GPTQ_WINDOW = 2048
LLAMACPP_WINDOW = 512
HF_STRIDE = 512
HF_WINDOW = 4096  # each token is read window / stride times: a context of 131,072 would be read 256 times


class Window(NamedTuple):
    """A window: the model reads ids[start:stop]; ids[first:last] are scored, each by the position before it."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class Protocol:
    """A protocol of perplexity.

    Attributes:
        windows: cuts a text of n tokens, given the context; with `documents` a document, whose first token is the
            prefix.
        bos: read the first token of each window as BOS, if the tokenizer adds BOS to a text.
        unit: divisor of the NLL, scored `tokens` or `words`.
    """

    windows: Callable[[int, int | None], list[Window]]
    bos: bool = False
    documents: bool = False
    unit: str = "tokens"


def gptq_2048(tokens: int, context: int | None) -> list[Window]:
    """Non-overlapping windows of 2048 tokens (or the context, if shorter); all tokens except the first are scored.

    The incomplete last window is dropped. The protocol of the GPTQ paper's code (arXiv 2210.17323). Raises `ValueError`
    for a text shorter than a window.
    """
    size = min(GPTQ_WINDOW, context or CONTEXT)
    return [Window(start, start + size, start + 1, start + size) for start in _starts(tokens, size)]


def llamacpp_512(tokens: int, context: int | None) -> list[Window]:
    """Non-overlapping windows of 512 tokens (or the context, if shorter); the second half is scored.

    Positions 256 and later of 512 predict tokens 257 to 511: 255 are scored. The incomplete last window is dropped. The
    protocol of llama.cpp's llama-perplexity. Raises `ValueError` for a text shorter than a window.
    """
    size = min(LLAMACPP_WINDOW, context or CONTEXT)
    return [Window(start, start + size, start + size // 2 + 1, start + size) for start in _starts(tokens, size)]


def hf_strided(tokens: int, context: int | None) -> list[Window]:
    """Windows of the context, at most 4096 tokens, with a stride of 512 (or half a window, if shorter).

    Each token except the text's first is scored once, given the tokens before it in its window. The recipe "Perplexity
    of fixed-length models" of transformers' documentation.
    """
    size = min(HF_WINDOW, context or CONTEXT)
    stride = min(HF_STRIDE, size // 2)
    windows: list[Window] = []
    scored = 1
    for start in range(0, tokens, stride):
        stop = min(start + size, tokens)
        windows.append(Window(start, stop, scored, stop))
        scored = stop
        if stop == tokens:
            break
    return [window for window in windows if window.first < window.last]


def lm_eval_word(tokens: int, context: int | None) -> list[Window]:
    """Windows over a document of `tokens` tokens, the first of which is the prefix; all others are scored once.

    Each window scores as many tokens as the context holds, and starts with the last token of the previous one. The last
    window is as long as the others, so that its tokens have the full context. The protocol of lm-evaluation-harness's
    loglikelihood_rolling.
    """
    size = context or CONTEXT
    windows = []
    scored = 1
    while scored < tokens:
        last = min(scored + size, tokens)
        windows.append(Window(max(0, last - 1 - size), last - 1, scored, last))
        scored = last
    return windows


def _starts(tokens: int, size: int) -> range:
    if tokens < size:
        raise ValueError(f"{tokens} tokens do not fill one window of {size}")
    return range(0, tokens - size + 1, size)


PROTOCOLS = {
    "gptq-2048": Protocol(gptq_2048),
    "llamacpp-512": Protocol(llamacpp_512, bos=True),
    "hf-strided": Protocol(hf_strided),
    "lm-eval-word": Protocol(lm_eval_word, documents=True, unit="words"),
}
