"""llama.cpp's library through its Python binding: token ids in, logits out; for one or several sequences."""

import ctypes
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantmill import engines, llamacpp
from quantmill.checkpoint import gguf_file
from quantmill.common.program import UserError
from quantmill.llamacpp import cells, files
from quantmill.metrics.footprint import Cache, Footprint

STEP = cells.PAGE
BATCH = 2048  # tokens at a time, as in llama-perplexity
KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}  # ggml's numbers
FLASH_LINE = re.compile(r"resolve_fused_ops: flash attention (enabled|not supported)", re.IGNORECASE)


class Engine(engines.Engine):
    """See `engines.Engine`. Options and their defaults are those of llama.cpp's programs."""

    capabilities = frozenset({"logits", "batches", "multi_gpu"})
    modes = ("greedy",)
    goes_on = True

    def __init__(
        self,
        artifact: Path,
        device: str,
        threads: int,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: str = "auto",
        n_batch: int | None = None,
        n_ubatch: int | None = None,
    ) -> None:
        self.file = files.first(artifact)
        self.lib = llamacpp.binding()
        if device == "cuda" and not self.lib.llama_supports_gpu_offload():
            raise UserError(
                "device cuda: llama.cpp was compiled without CUDA, because nvcc or a GPU was missing then; delete "
                f"{llamacpp.folder()} and run again where both are"
            )
        sizes = {"n_batch": n_batch, "n_ubatch": n_ubatch}
        self.settings = {name: size for name, size in sizes.items() if size is not None}
        self.settings["type_k"] = _number("type_k", type_k, KV_TYPES)
        self.settings["type_v"] = _number("type_v", type_v, KV_TYPES)
        self.settings["flash_attn_type"] = _number("flash_attn", flash_attn, cells.FLASH)
        self.device, self.threads, self.flash = device, threads, flash_attn
        self._listen()
        self.lib.llama_backend_init()
        parameters = self.lib.llama_model_default_params()
        if device == "cpu":  # without layers on it, a GPU would still multiply prompts
            none = (ctypes.c_void_p * 1)()  # an empty list: its end
            parameters.devices = ctypes.addressof(none)
        self.model = self.lib.llama_model_load_from_file(str(self.file).encode(), parameters)
        if not self.model:
            raise UserError(f"{self.file}: llama.cpp cannot load it ({self.last_error()})")
        vocabulary = self.lib.llama_model_get_vocab(self.model)
        self.vocab_size = self.lib.llama_vocab_n_tokens(vocabulary)
        self.stop_ids = [each for each in range(self.vocab_size) if self.lib.llama_vocab_is_eog(vocabulary, each)]
        self.seen = 0, np.empty((0, self.vocab_size), np.float32)  # the address of logits, and their array
        self.batch = self.lib.llama_batch_init(BATCH, 0, 1)
        self.context, self.size, self.n_batch = None, (0, 0), BATCH
        self._prepare(STEP, 1)  # so that an unsupported model is refused here
        self.compute_type = files.compute_type(gguf_file.read_all(self.file))

    def _listen(self) -> None:
        """Keep the library's messages; warnings and errors also go to the log."""
        self.said: list[str] = []

        def keep(level: int, text: bytes, _: Any) -> None:
            line = text.decode(errors="replace")
            self.said.append(line)
            if level >= 3 or FLASH_LINE.search(line):  # warnings and errors
                sys.stderr.write(line)

        # a reference, or it would be freed while the library calls it
        self.callback = self.lib.llama_log_callback(keep)
        self.lib.llama_log_set(self.callback, ctypes.c_void_p(0))

    def last_error(self) -> str:
        """Return the library's first line about an error."""
        lines = [line.strip() for line in "".join(self.said).splitlines()]
        errors = [line for line in lines if "error" in line.lower() or "fail" in line.lower()]
        return (errors or lines or ["no message"])[0][:300]

    def _prepare(self, tokens: int, sequences: int) -> None:
        """Make room for `tokens` of each of `sequences`, and forget what was read."""
        if tokens > self.size[0] or sequences != self.size[1]:
            if self.context:
                self.lib.llama_free(self.context)
            self.size = (-(-tokens // STEP) * STEP, sequences)
            parameters = self.lib.llama_context_default_params()
            parameters.n_ctx, parameters.n_seq_max = self.size[0] * sequences, sequences
            parameters.n_batch = BATCH
            for name, value in self.settings.items():
                setattr(parameters, name, value)
            parameters.n_threads = parameters.n_threads_batch = self.threads
            self.context = self.lib.llama_init_from_model(self.model, parameters)
            if not self.context:
                self.size = (0, 0)
                raise UserError(f"{self.file}: llama.cpp cannot run it ({self.last_error()})")
            if match := FLASH_LINE.search("".join(self.said)):
                self.flash = "auto: on" if match[1].lower() == "enabled" else "auto: off"
            self.n_batch = min(BATCH, self.lib.llama_n_batch(self.context))
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)

    def _fill(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Fill the batch with entries of id, position, sequence, and whether its logits are needed."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for place, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = wanted

    def _calculate(self) -> None:
        """Run the batch."""
        if status := self.lib.llama_decode(self.context, self.batch):
            raise UserError(f"{self.file}: llama.cpp's decoding failed (status {status}: {self.last_error()})")

    def _rows(self, count: int) -> np.ndarray:
        """Return the logits [count, vocab] of the last call, in the library's own memory."""
        pointer = self.lib.llama_get_logits(self.context)
        place = ctypes.addressof(pointer.contents)
        if place != self.seen[0] or count > len(self.seen[1]):  # making the array takes longer than using it
            self.seen = place, np.ctypeslib.as_array(pointer, (count, self.vocab_size))
        return self.seen[1][:count]

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        length, numbers = len(prompts[0]), range(len(prompts))
        self._prepare(length + n, len(prompts))
        entries = [
            (token, position, number, position == length - 1)
            for number, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        chosen = [0] * len(prompts)
        for start in range(0, len(entries), self.n_batch):
            part = entries[start : start + self.n_batch]
            self._fill(part)
            self._calculate()
            last = [number for _, _, number, wanted in part if wanted]
            for row, number in enumerate(last):
                chosen[number] = self._choose(row)
        self._fill([(0, 0, number, True) for number in numbers])
        tokens, positions = self.batch.token, self.batch.pos
        for position in range(length, length + n):
            now = time.perf_counter()
            for number in numbers:
                yield number, chosen[number], now
            if position + 1 < length + n:
                for number in numbers:
                    tokens[number], positions[number] = chosen[number], position
                self._calculate()
                chosen = [self._choose(number) for number in numbers]

    def _choose(self, row: int) -> int:
        """Return the likeliest token of a row of logits that is not an end of sequence."""
        logits = self._rows(row + 1)[row]
        for each in self.stop_ids:
            logits[each] = -np.inf
        return int(logits.argmax())

    def logits(self, ids: list[int]) -> Iterator[np.ndarray]:
        self._prepare(len(ids), 1)
        size = min(self.n_batch, engines.chunk_positions(self.vocab_size, self.device))
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            self._fill([(token, start + place, 0, True) for place, token in enumerate(part)])
            self._calculate()
            yield self._rows(len(part)).copy()

    def weight_bytes(self) -> int:
        return files.bytes_per_token(gguf_file.read_all(self.file))

    def footprint(self) -> Footprint:
        # the library's default gives layers with a window as much room as the others (swa_full)
        found = cells.ask(self.file, self.settings)
        cache = Cache(found.layers, page=STEP) if found else None
        return Footprint(files.weight_bytes(gguf_file.read_all(self.file)), cache)

    def versions(self) -> dict[str, str]:
        build = llamacpp.build()
        kinds = {number: name for name, number in KV_TYPES.items()}
        parts = build["flags"].get("CMAKE_CUDA_ARCHITECTURES"), build.get("nvcc")
        compiled = (
            {"CUDA": ", ".join(filter(None, parts)) or "unknown build"}
            if self.device == "cuda"
            else {"instruction sets": " ".join(build["instruction_sets"]) or "the compiler's choice"}
        )
        return {
            "llama.cpp": build["sources"],
            **compiled,
            "KV": f"{kinds[self.settings['type_k']]}, {kinds[self.settings['type_v']]}",
            "flash attention": self.flash,
        }

    def close(self) -> None:
        if self.context:
            self.lib.llama_free(self.context)
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_model_free(self.model)
        self.context = self.model = None


def _number(option: str, value: str, known: Mapping[str, int]) -> int:
    """Return the library's number of an option's value. Raises `UserError` for a value that it does not have."""
    if value not in known:
        raise UserError(f"llama_cpp: {option} is {value!r}; it is one of {', '.join(known)}")
    return known[value]
