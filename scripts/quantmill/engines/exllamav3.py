"""ExLlamaV3's own loader, kernels and generator for EXL3, on an NVIDIA GPU, used as in its manual."""

import gc
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quantmill import engines
from quantmill.checkpoint import shards
from quantmill.common import remote_code, special_tokens
from quantmill.common.model_config import of_text
from quantmill.common.program import UserError
from quantmill.exllamav3 import decodes_in_int8, library

remote_code.forbid()
library()
import exllamav3  # noqa: E402
from exllamav3.constants import PAGE_SIZE  # noqa: E402
from exllamav3.ext import exllamav3_ext  # noqa: E402
from exllamav3.generator.sampler import CustomSampler, SS_Argmax, SS_BanTokens  # noqa: E402

WHOLE = {"attn_mode": "flash_attn_nc"}  # the library's option: a text at once, without a cache


class Job(exllamav3.Job):
    """A job of the generator that records each token when it is on the host: the generator itself holds back what may
    be part of a character."""

    told: list[tuple[int, float]]

    def receive_sample(self, logits: Any, next_token: Any, *rest: Any, **words: Any) -> Any:
        token = int(next_token.item())  # waits for the GPU, as the library does next
        self.told.append((token, time.perf_counter()))
        return super().receive_sample(logits, next_token, *rest, **words)


class Engine(engines.Engine):
    """See `engines.Engine`. Scoring runs a text at once, in float16. When it decodes, the library rounds the inputs of
    most layers to int8 (`decodes_in_int8`), which is then its `compute_type`."""

    capabilities = frozenset({"logits", "batches"})
    modes = ("generator",)
    goes_on = True

    def __init__(self, artifact: Path, device: str, threads: int) -> None:
        if device != "cuda":
            raise UserError("engine exllamav3: runs on NVIDIA GPUs only")
        torch.set_num_threads(threads)
        content = shards.read_config(artifact / "config.json")
        self.artifact, self.vocab_size = artifact, of_text(content)["vocab_size"]
        self.stop_ids = special_tokens.ends(content)
        self.model = exllamav3.Model.from_config(exllamav3.Config.from_directory(str(artifact)))
        self.tokenizer = exllamav3.Tokenizer.from_config(self.model.config)
        self.generator: Any = None
        self.model.load(device="cuda:0")
        in_int8 = decodes_in_int8(shards.find(artifact).tensors(), exllamav3_ext.exl3_gemv_int8_max_k(0))
        self.compute_type = "int8" if in_int8 else "float16"

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        # each prompt in pages of its own
        needed = sum(-(-(len(ids) + n + 1) // PAGE_SIZE) * PAGE_SIZE for ids in prompts)
        if self.generator is None or self.generator.cache.max_num_tokens < needed:
            self._make_room(needed)
        self.generator.pagetable.reset_page_table()  # or it would reuse pages of an earlier prompt
        sampler = CustomSampler([SS_BanTokens(self.stop_ids), SS_Argmax()])
        jobs = []
        for ids in prompts:
            job = Job(torch.tensor([ids]), max_new_tokens=n, sampler=sampler)
            job.told = []
            jobs.append(job)
        self.generator.enqueue(jobs)
        try:
            while self.generator.num_remaining_jobs():
                for result in self.generator.iterate():
                    if "error" in result:
                        raise result["error"]
                for number, job in enumerate(jobs):
                    for token, at in job.told:
                        yield number, token, at
                    job.told.clear()
        finally:
            self.generator.clear_queue()  # the caller needs no more

    def _make_room(self, tokens: int) -> None:
        """Make a generator with a cache of `tokens`. The library makes a cache when it loads the model."""
        self.model.unload()
        if self.generator is not None:
            self.generator.cache.detach_from_model()
            self.generator = None
        gc.collect()
        torch.cuda.empty_cache()
        cache = exllamav3.Cache(self.model, max_num_tokens=tokens)
        self.model.load(device="cuda:0")
        self.generator = exllamav3.Generator(model=self.model, cache=cache, tokenizer=self.tokenizer)

    @torch.inference_mode()
    def _forward(self, ids: list[int]) -> torch.Tensor:
        return self.model.forward(torch.tensor([ids]), dict(WHOLE))[0, :, : self.vocab_size]

    def logits(self, ids: list[int]) -> Iterator[Any]:
        for chunk in self._forward(ids).split(engines.chunk_positions(self.vocab_size, "cuda")):
            yield chunk.float()

    def weight_bytes(self) -> int | None:
        return shards.bytes_per_token(self.artifact)

    def peak_allocated_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated()

    def versions(self) -> dict[str, str]:
        return {"exllamav3": version("exllamav3"), "torch": torch.__version__}

    def close(self) -> None:
        self.generator = None
        self.model.unload()
        gc.collect()
        torch.cuda.empty_cache()
