"""What an engine or a server tells of a given text, where it has no logits."""

from typing import NamedTuple

import numpy as np


class Targets(NamedTuple):
    """What an engine without logits tells of a text's n ids: natural log-probabilities given those before.

    logprobs: [n - 1], of each id but the first.
    top_ids, top_logprobs: [n - 1, k], the k likeliest ids at each of these places, the likeliest first, and what they
    have; k is 0 where the engine tells the targets' alone.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
