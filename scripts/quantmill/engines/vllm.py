"""vLLM offline: its engine in a process of its own, token ids in and out. Its server is the engine `vllm-serve`.

Options and their defaults are those of vLLM's `LLM`, except for servers.vllm_settings.
"""

import atexit
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # read at import

import numpy as np
import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind

from quantmill import engines
from quantmill.checkpoint import shards
from quantmill.client.likelihood import TOP
from quantmill.common import special_tokens
from quantmill.common.program import UserError, first_line, leave_at_once
from quantmill.devices import cpu
from quantmill.metrics.footprint import Footprint
from quantmill.servers import vllm_settings
from quantmill.servers.guard import Guard
from quantmill.servers.vllm_settings import OURS

OPTIONS = {field.name for field in dataclasses.fields(EngineArgs)} - OURS


class Engine(engines.Engine):
    """See `engines.Engine`."""

    capabilities = frozenset({"target_logprobs", "batches", "multi_gpu", "own_threads"})
    modes = ("vLLM",)
    can_end = True  # it ends after one, and returns it

    def __init__(self, artifact: Path, device: str, threads: int, **options: Any) -> None:
        for option in options:
            engines.check_name(self.name, option, OPTIONS)
        config = shards.read_json(artifact / "config.json")
        self.stop_ids = special_tokens.ends(config)
        self.artifact, self.requests = artifact, 0
        cards = torch.cuda.device_count() if device == "cuda" else 0
        own = sorted(cpu.processors())[:threads]
        os.environ |= {**vllm_settings.environment(cards, own), **vllm_settings.SOCKETS, **self.environment}
        self.threads = len(own)
        settings = vllm_settings.settings(artifact, options, cards)
        self.guard = Guard()
        try:
            self.llm = vllm.LLM(str(artifact), skip_tokenizer_init=True, disable_log_stats=True, **settings)
        except Exception as error:  # its loaders and kernels raise many kinds
            raise UserError(f"{artifact}: vLLM cannot load it ({first_line(error)}); its log says more") from None
        self.guard.settle()
        self.engine = self.llm.llm_engine
        leave_at_once()  # or "terminate called without an active exception", once in dozens of runs
        atexit.register(self.close)
        self.config = self.engine.vllm_config
        self.compute_type = str(self.config.model_config.dtype).removeprefix("torch.")
        self.products = vllm_settings.products(artifact, device, self.compute_type)

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        asked = vllm.SamplingParams(
            temperature=0,
            max_tokens=n,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **self.ending(n),
        )
        names = {self._add(ids, asked): number for number, ids in enumerate(prompts)}
        try:
            while self.engine.has_unfinished_requests():
                outputs = self.engine.step()
                now = time.perf_counter()
                for output in outputs:
                    for token in output.outputs[0].token_ids:
                        yield names[output.request_id], token, now
        finally:
            if self.engine.has_unfinished_requests():  # the caller needs no more
                self.engine.abort_request(list(names))

    def ending(self, n: int) -> dict[str, Any]:
        """Return vLLM's options about ends of sequence: it masks them for n tokens, on a GPU by one kernel for each."""
        return {"min_tokens": 0 if self.may_end else n, "stop_token_ids": self.stop_ids}

    def _add(self, ids: list[int], asked: vllm.SamplingParams) -> str:
        """Add a prompt, and return the request's name."""
        self.requests += 1
        name = str(self.requests)
        self.engine.add_request(name, {"prompt_token_ids": ids}, asked)
        return name

    def target_logprobs(self, ids: list[int]) -> engines.Targets:
        return next(self.target_logprobs_batch([ids]))

    def target_logprobs_batch(self, texts: list[list[int]]) -> Iterator[engines.Targets]:
        asked = vllm.SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=TOP, flat_logprobs=True, detokenize=False
        )
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in texts], asked, use_tqdm=False)
        for ids, output in zip(texts, outputs, strict=True):
            found = output.prompt_logprobs  # of each position: the target's, then those of the likeliest tokens
            shape = (len(ids) - 1, TOP + 1)
            tokens, values = (np.array(each).reshape(shape) for each in (found.token_ids, found.logprobs))
            if tokens[:, 0].tolist() != ids[1:]:
                raise UserError(f"{self.artifact}: vLLM returned log-probabilities of other tokens than it was given")
            yield engines.Targets(values[:, 0], tokens[:, 1:], values[:, 1:])

    def weight_bytes(self) -> int | None:
        return shards.bytes_per_token(self.artifact)

    def footprint(self) -> Footprint | None:
        config, scheduler = self.config, self.config.scheduler_config
        if config.speculative_config:  # a draft's weights and layers are not counted
            return None
        in_flight = getattr(config, "max_in_flight_tokens", scheduler.max_num_batched_tokens)
        return vllm_settings.footprint(
            self.artifact,
            config.model_config.hf_text_config.to_dict(),
            self.compute_type,
            str(config.cache_config.cache_dtype),
            config.cache_config.block_size,
            None if scheduler.disable_hybrid_kv_cache_manager else in_flight,
            config.parallel_config.tensor_parallel_size,
        )

    def versions(self) -> dict[str, str]:
        cache, model = self.config.cache_config, self.config.model_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "quantization": str(model.quantization),
            "kv cache": str(cache.cache_dtype),
            "graphs": str(self.config.compilation_config.cudagraph_mode),
        } | self.products

    def close(self) -> None:
        atexit.unregister(self.close)
        self.engine.engine_core.shutdown()
        self.guard.close()
