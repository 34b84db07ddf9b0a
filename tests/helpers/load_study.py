"""Loads for the fake server, and a plan of them."""

from dataclasses import replace
from typing import Any

import numpy as np
from fake_model import VOCAB

from quantmill.loads.plan import Plan
from quantmill.tokens.files import Tokens

A, B, C, D = TIMES = (0.01, 0.0001, 0.01, 0.001)
LIMITS = {"ttft_ms": 500.0, "tpot_ms": 100.0}
SERVING: dict[str, Any] = {
    "burst": 0,
    "concurrency": [],
    "rates": [],
    "goodput": False,
    "limits": LIMITS,
    "prompt_tokens": 32,
    "new_tokens": 12,
    "requests": 40,
    "restarts": 1,
}
IDS = np.random.default_rng(3).integers(2, VOCAB, size=6000).tolist()
EVALUATION = Tokens("evaluation", context=512, ids=IDS)
BURST = [IDS[40 * place : 40 * place + 20 + place] for place in range(12)]


def plan(evaluation: dict[str, Any] | None = None, **serving: Any) -> Plan:
    return Plan(SERVING | serving, replace(EVALUATION, **(evaluation or {})), BURST, seed=0)
