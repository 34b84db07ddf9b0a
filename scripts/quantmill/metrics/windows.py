"""How each protocol cuts a text into windows, and which tokens of them it scores. Lengths in, places out.

The same float16 model is published with "WikiText perplexities" from 5.1 to 12.2: the protocol is part of the number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

CONTEXT = 2048  # of a model that does not say
GPTQ_WINDOW = 2048
LLAMACPP_WINDOW = 512
HF_STRIDE = 512
HF_WINDOW = 4096  # each token is read window / stride times: a context of 131,072 would be read 256 times


class Window(NamedTuple):
    """The model reads ids[start:stop]; ids[first:last] are scored, each by the position before it."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class Protocol:
    """A way to a perplexity.

    `windows(tokens, context)` cuts a text (or with `documents` one document, whose first token is the prefix) of so
    many tokens. `bos`: the first token of each window is read as a beginning-of-sequence token, where the tokenizer
    adds one to a text. `unit`: what the NLL is divided by, `tokens` (that are scored) or `words`.
    """

    windows: Callable[[int, int | None], list[Window]]
    bos: bool = False
    documents: bool = False
    unit: str = "tokens"


def gptq_2048(tokens: int, context: int | None) -> list[Window]:
    """Non-overlapping windows of 2048 tokens, or of the context where that is shorter; all but the first are scored.

    The tail that fills no window is dropped. The protocol of the GPTQ paper's code (arXiv 2210.17323). Raises
    `ValueError` where the text fills no window.
    """
    size = min(GPTQ_WINDOW, context or CONTEXT)
    return [Window(start, start + size, start + 1, start + size) for start in _starts(tokens, size)]


def llamacpp_512(tokens: int, context: int | None) -> list[Window]:
    """Non-overlapping windows of 512 tokens, or of the context where that is shorter; the second half is scored.

    Of 512 positions those from 256 on predict tokens 257 to 511: 255 are scored. The tail is dropped. As llama.cpp's
    llama-perplexity does it. Raises `ValueError` where the text fills no window.
    """
    size = min(LLAMACPP_WINDOW, context or CONTEXT)
    return [Window(start, start + size, start + size // 2 + 1, start + size) for start in _starts(tokens, size)]


def hf_strided(tokens: int, context: int | None) -> list[Window]:
    """Windows of the context, at most 4096, that move on by 512 (by half a window where that is less).

    Every token but the text's first is scored once, with what precedes it in its window. The recipe "Perplexity of
    fixed-length models" of transformers' documentation.
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
    """Windows over one document of `tokens` tokens, the first of which is the prefix; all others are scored once.

    Each window scores as many as the context holds, and starts with the last token of the one before; the last is as
    long as the others, so that its tokens have all the context there is. As lm-evaluation-harness's
    loglikelihood_rolling does it.
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
