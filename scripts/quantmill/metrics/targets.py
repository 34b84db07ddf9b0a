"""Log-probabilities of a given text, from an engine or a server without logits."""

from typing import NamedTuple

import numpy as np


class Targets(NamedTuple):
    """Natural log-probabilities of a text's n ids, each given the ids before it.

    Attributes:
        logprobs: [n - 1], of each id except the first.
        top_ids, top_logprobs: [n - 1, k], the k likeliest ids at each of these positions in descending order, and their
            log-probabilities; k is 0 if the engine reports only the targets'.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
