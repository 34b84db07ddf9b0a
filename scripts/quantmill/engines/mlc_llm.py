"""MLC-LLM's own engine, kernels and compiler, in a Python of the user's (`interpreters.mlc_llm`).

It is used through its synchronous engine, which takes and returns token ids; the engine like OpenAI's API returns only
text. It does not report the probabilities of a given text, so quality is an empty cell. Tested with a stand-in.
"""

import importlib.metadata
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlc_llm.protocol.debug_protocol import DebugConfig
from mlc_llm.protocol.generation_config import GenerationConfig
from mlc_llm.serve import data
from mlc_llm.serve.config import EngineConfig
from mlc_llm.serve.sync_engine import SyncMLCEngine

from quantmill import engines
from quantmill.checkpoint import shards
from quantmill.common import special_tokens
from quantmill.common.program import UserError, first_line

CONFIG = "mlc-chat-config.json"
LIBRARY = "mlc_llm.so"  # if the artifact has none, MLC-LLM compiles one now
NEVER = -100.0  # the smallest bias that MLC-LLM takes


class Engine(engines.Engine):
    """See `engines.Engine`. One sequence at a time, in its mode for one user."""

    capabilities = frozenset()
    modes = ("MLC-LLM",)
    goes_on = True

    def __init__(self, artifact: Path, device: str, threads: int, mode: str = "interactive") -> None:
        said = shards.read_json(artifact / CONFIG)
        vocab_size = said.get("vocab_size") or said.get("model_config", {}).get("vocab_size")
        self.stop_ids = special_tokens.select(said.get("eos_token_id"), vocab_size)
        self.compute_type = "float32" if "f32" in str(said.get("quantization")) else "float16"
        library = artifact / LIBRARY
        self.came: list[tuple[int, float]] = []
        self.requests = 0
        try:
            self.engine = SyncMLCEngine(
                str(artifact),
                device,
                model_lib=str(library) if library.exists() else None,
                mode=mode,
                # or a repeated prompt would not be read
                engine_config=EngineConfig(prefix_cache_mode="disable"),
                request_stream_callback=self._keep,
            )
        except Exception as error:  # its compiler and loader raise many kinds
            raise UserError(f"{artifact}: MLC-LLM cannot load it ({first_line(error)})") from None

    def _keep(self, outputs: list[Any]) -> None:
        now = time.perf_counter()
        for output in outputs:
            _, (stream, *_) = output.unpack()
            self.came += [(int(token), now) for token in stream.delta_token_ids]

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        (ids,) = prompts
        greedy = GenerationConfig(
            n=1,
            temperature=0.0,
            max_tokens=n,
            logit_bias=dict.fromkeys(self.stop_ids, NEVER) or None,
            debug_config=DebugConfig(ignore_eos=True),
        )
        self.came, self.requests = [], self.requests + 1
        name = str(self.requests)
        self.engine.add_request(self.engine.create_request(name, data.TokenData(ids), greedy))
        told, steps = 0, 0
        while told < n and steps < 2 * n + len(ids):  # a step may read a part of the prompt and bring no token
            self.engine.step()
            steps += 1
            for token, at in self.came[told:n]:
                yield 0, token, at
            told = min(len(self.came), n)
        self.engine.reset()  # drop the rest of the request

    def versions(self) -> dict[str, str]:
        names = ("mlc-llm", "mlc-llm-nightly")
        found = (each.version for name in names for each in importlib.metadata.distributions(name=name))
        return {"mlc_llm": next(found, "unknown")}

    def close(self) -> None:
        del self.engine
