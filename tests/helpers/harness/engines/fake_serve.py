"""The fake server of tests/helpers as an engine. Options: `fault`, `slots`, `times` (of its command line), `context`
(which its slots are said to share), and `port`, which is Quantmill's own."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from quantmill import engines
from quantmill.client import query
from quantmill.client.checks import Counters
from quantmill.engines.served.started import Started

HELPERS = Path(__file__).parents[2]
sys.path.append(str(HELPERS))
from fake_model import VOCAB, Model  # noqa: E402


class Engine(Started):
    """See `served.started.Started`."""

    capabilities = Started.capabilities | {"target_logprobs", "batches"}
    ours: ClassVar = frozenset({"port", "model"})
    compute_type = "float64"

    def command(
        self, artifact: Path, device: str, threads: int, port: int, options: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        self.context = options.get("context")
        argv = [sys.executable, str(HELPERS / "fake_server.py"), "--port", str(port)]
        argv += ["--slots", str(options.get("slots", 16)), "--times", *map(str, options.get("times", (0, 0, 0, 0)))]
        return [*argv, *(["--fault", options["fault"]] if options.get("fault") else [])], {}

    def shared_context(self, context: int | None) -> int | None:
        return self.context

    def counters(self) -> Counters:
        return Counters(**json.loads(query.get(self.target, "/metrics")))

    def target_logprobs(self, ids: list[int]) -> engines.Targets:
        body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": VOCAB}
        told = json.loads(query.ask(self.target, "/v1/completions", body))["prompt_logprobs"]
        rows = np.array(Model().rows(ids))
        likeliest = np.argsort(-rows, axis=1)
        return engines.Targets(np.array(told[1:]), likeliest, np.take_along_axis(rows, likeliest, axis=1))

    def versions(self) -> dict[str, str]:
        return {"fake": "1", "arguments": self.arguments}
