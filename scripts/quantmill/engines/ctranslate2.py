"""CTranslate2's Generator. Where a device has no arithmetic for a stored type it uses another and reports which."""

import atexit
import ctypes
import json
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quantmill import engines
from quantmill.checkpoint import ctranslate2_bin, ctranslate2_model, shards
from quantmill.common import special_tokens
from quantmill.common.program import UserError, first_line
from quantmill.devices import cpu, cuda
from quantmill.metrics.footprint import Cache, Footprint, Layers

# Without VNNI, oneDNN adds pairs of int8 products in 16 bits, which saturate, and so does MKL on Intel's processors.
# With its oldest instructions MKL adds them in 32 bits; on AMD's processors it did so by itself. Both variables are
# read when the libraries are loaded.
if engines.EXACT in os.environ and not cpu.has_vnni():
    os.environ |= {"CT2_USE_MKL": "1", "MKL_CBWR": "COMPATIBLE"}

import ctranslate2

ATTENDED = "self_attention/linear_1/weight"  # reads what all heads attended to


def check_cublas() -> None:
    """Raise `UserError` where cuBLAS 12 is missing: CTranslate2 opens it only when it first multiplies."""
    try:
        ctypes.CDLL("libcublas.so.12")
    except OSError:
        raise UserError(
            "ctranslate2 needs cuBLAS 12 (libcublas.so.12), which is missing; install that of CUDA 12, or put links "
            "of that name to CUDA 13's on LD_LIBRARY_PATH (docs/FOOTGUNS.md)"
        ) from None


def _release(engine: weakref.ref) -> None:
    """Destroy a Generator before the interpreter unloads. A worker thread that called back into Python would otherwise
    end after the interpreter ("terminate called without an active exception")."""
    if (found := engine()) is not None:
        vars(found).pop("generator", None)


class Engine(engines.Engine):
    """See `engines.Engine`."""

    capabilities = frozenset({"logits", "batches"})
    modes = ("greedy search",)
    can_end = True  # it ends after one

    def __init__(self, artifact: Path, device: str, threads: int, compute_type: str = "default") -> None:
        if device == "cuda" and ctranslate2.get_cuda_device_count() == 0:
            raise UserError(f"device cuda: ctranslate2 {ctranslate2.__version__} sees no GPU; use device: cpu")
        if device == "cuda":
            check_cublas()
        if not (artifact / "model.bin").exists():
            raise UserError(f"{artifact}: holds no model.bin, so it is not a CTranslate2 artifact; build it again")
        self.variables = ctranslate2_model.check(artifact)  # CTranslate2 itself does not check shapes
        try:
            self.generator = ctranslate2.Generator(
                str(artifact), device=device, intra_threads=threads, compute_type=compute_type
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{artifact}: CTranslate2 cannot load it ({first_line(error)})") from None
        atexit.register(_release, weakref.ref(self))
        self.artifact = artifact
        self.compute_type = self.generator.compute_type
        # generation takes tokens as strings; the position in this list is the id
        self.vocabulary: list[str] = json.loads((artifact / "vocabulary.json").read_text(encoding="utf-8"))
        stop = json.loads((artifact / "config.json").read_text(encoding="utf-8")).get("eos_token")
        own = [self.vocabulary.index(stop)] if stop in self.vocabulary else []
        # its config.json holds one; build.ct2 adds those of the model's generation_config.json
        said = artifact / "generation_config.json"
        more = shards.read_json(said).get("eos_token_id") if said.is_file() else None
        self.stop_ids = list(dict.fromkeys([*own, *special_tokens.select(more, len(self.vocabulary))]))

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        tokens: list[tuple[int, int, float]] = []

        def keep(result: ctranslate2.GenerationStepResult) -> bool:
            tokens.append((result.batch_id, result.token_id, time.perf_counter()))
            return False  # go on

        # The callback runs in the decoding thread, for one sequence after the other. generate_tokens passes tokens to
        # another thread through a queue, where they wait while the decoding threads hold the cores: the first came
        # late, and others in bursts. min_length forbids the end-of-sequence token before n tokens.
        options: dict[str, Any] = {"max_length": n, "min_length": n, "beam_size": 1, "sampling_topk": 1}
        # without it, CTranslate2 takes a token outside the vocabulary as the end and writes beyond the logits
        options["end_token"] = self.stop_ids
        options |= {"min_length": 0, "return_end_token": True} if self.may_end else {}
        texts = [[self.vocabulary[token] for token in ids] for ids in prompts]
        self.generator.generate_batch(texts, include_prompt_in_result=False, callback=keep, **options)
        yield from tokens

    def logits(self, ids: list[int]) -> Iterator[Any]:
        # forward_batch keeps no state and returns all positions, so at least one window of logits is in memory
        try:
            window = self.generator.forward_batch([ids])
        except ValueError as error:  # a sliding window that is shorter than the text
            reason = f"cannot score {len(ids)} tokens of this model at once ({first_line(error)})"
            raise UserError(f"{self.artifact}: CTranslate2 {reason}") from None
        size = engines.chunk_positions(window.shape[2], self.generator.device)
        # a view does not keep `window` alive, so chunks are copied out of it
        if torch := cuda.torch() if self.generator.device == "cuda" else None:
            if window.dtype == ctranslate2.DataType.bfloat16:  # which the interface of arrays lacks
                window = window.to(ctranslate2.DataType.float32)
            torch.cuda.synchronize()  # CTranslate2 has a stream of its own
            for part in torch.as_tensor(window, device="cuda")[0].split(size):
                yield part.to(torch.float32, copy=True)
            torch.cuda.synchronize()  # before the window's memory is another's
            return
        window = window.to_device(ctranslate2.Device.cpu).to(ctranslate2.DataType.float32)
        view = np.asarray(window)[0]
        for start in range(0, len(view), size):
            yield view[start : start + size].copy()

    def weight_bytes(self) -> int:
        return ctranslate2_bin.bytes_per_token(self.variables, self.compute_type)

    def footprint(self) -> Footprint:
        sizes = (ctranslate2_bin.loaded_bytes(*each, self.compute_type) for each in self.variables.items())
        return Footprint(sum(sizes), self._cache())

    def _cache(self) -> Cache | None:
        """Return how keys and values are kept: in the type of activations, and once for each head that reads them, also
        if several heads share them (replicate_heads in its src/layers/attention.cc). None for sliding windows."""
        if any(name.endswith("sliding_window") and each.value for name, each in self.variables.items()):
            return None
        size = ctranslate2_bin.BYTES[ctranslate2_bin.parts(self.compute_type)[1]]
        outputs = [each for name, each in self.variables.items() if name.endswith(ATTENDED)]
        return Cache([Layers(1, 2 * each.shape[1] * size) for each in outputs])

    def versions(self) -> dict[str, str]:
        rough = self.generator.device == "cpu" and self.compute_type.startswith("int8") and not cpu.has_vnni()
        in_32_bits = (os.environ.get("CT2_USE_MKL"), os.environ.get("MKL_CBWR")) == ("1", "COMPATIBLE")
        products = {"int8 products": "saturate, for want of VNNI"} if rough and not in_32_bits else {}
        return {"ctranslate2": ctranslate2.__version__} | products

    def close(self) -> None:
        self.generator.unload_model()
