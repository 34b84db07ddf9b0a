"""Hugging Face transformers: the reference. float16 on CUDA; on a CPU the same weights are calculated in float32."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedModel

from quantmill import engines
from quantmill.checkpoint import float16, shards, share_read
from quantmill.common import remote_code, special_tokens
from quantmill.common.program import UserError, first_line
from quantmill.engines.decoding import kept
from quantmill.engines.decoding.merged import merge
from quantmill.engines.head import Head
from quantmill.engines.streamed import free_memory, shelf
from quantmill.metrics.footprint import Cache, Footprint

remote_code.forbid()

FLOATS = ("float32", "float16", "bfloat16")
DTYPES = {"cuda": torch.float16, "cpu": torch.float32}
# For the noise floor: what a GPU would calculate in, and the other dtype in which unquantized models are served
OTHER_DTYPES = {"cuda": "bfloat16", "cpu": "float16"}
PROBE = 8  # tokens
LAST_BITS = 2  # of the largest logit
BATCH = {"cpu": 512, "cuda": 8192}  # tokens of several short texts that run together


class Steps:
    """A streamer for `generate`: it keeps the tokens [sequences] of each step with their `time.perf_counter()`."""

    def __init__(self) -> None:
        self.came: list[tuple[list[int], float]] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Keep tokens, which are on the host."""
        at = time.perf_counter()
        self.came.append((tokens.flatten().tolist(), at))

    def end(self) -> None:
        """Do nothing: no token is held back."""


class Engine(engines.Engine):
    """See `engines.Engine`. The mode `generate` is the model's own method. `captured`, on a GPU, replays a step that
    was recorded as a CUDA graph: this is Quantmill's own way to decode, which transformers does not have."""

    capabilities = frozenset({"logits", "batches"})
    plain = True  # its layers are torch's own: they can be moved to a device, and merged there

    def __init__(
        self,
        artifact: Path,
        device: str,
        threads: int,
        dtype: str | None = None,
        attn_implementation: str | None = None,
        stream: bool = False,
    ) -> None:
        """See `engines.Engine`. stream: run the model block by block, also if it fits as a whole."""
        if dtype and dtype not in FLOATS:
            raise UserError(f"engine transformers: dtype {dtype!r} is not one of {', '.join(FLOATS)}")
        self.attention = {"attn_implementation": attn_implementation} if attn_implementation else {}
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(f"device cuda: torch {torch.__version__} of this environment sees no GPU; use device: cpu")
        torch.set_num_threads(threads)
        self.dtype = getattr(torch, dtype) if dtype else self.default_dtype(artifact, device)
        self.streamed: Any = None
        self.ahead: dict[tuple[int, ...], list[Callable[[], torch.Tensor]]] = {}  # states of texts, by `read_ahead`
        if self.plain and (stream or free_memory.exceeds(artifact, self.dtype, device)):
            from quantmill.engines.streamed.model import Streamed  # not in transformers 4, which auto-gptq has

            if self.dtype == torch.float16 and not all(map(float16.fits, shards.find(artifact).tensors().values())):
                self.dtype = torch.bfloat16
            self.streamed = Streamed(artifact, self.dtype, device, **self.attention)
            self.no_decoding = "the model runs block by block, and would be read anew for each token"
        model = self._load(artifact, device)
        if (
            self.plain
            and not self.streamed
            and self.dtype == torch.float16
            and not all(each.isfinite().all() for each in model.parameters())
        ):
            self.dtype = torch.bfloat16  # weights beyond float16's 65,504 became infinite
            model = self._load(artifact, device)
        if self.plain and not self.streamed:
            model = model.to(device)
        model.eval()
        model.generation_config = GenerationConfig()  # its publisher's may sample, or penalise repetition
        if device == "cuda":
            torch.cuda.empty_cache()  # cached blocks that loading left would count as the model's memory
        self.model: PreTrainedModel = model
        text_config = model.config.get_text_config()
        for config in (model.config, text_config):
            config.return_dict = True  # outputs are read by name here
        self.vocab_size = text_config.vocab_size
        self.device = device
        ends = [getattr(each, "eos_token_id", None) for each in (model.config, text_config)]
        self.stop_ids = special_tokens.select(ends[1] if ends[0] is None else ends[0], self.vocab_size)
        self.modes = self._modes()
        self.mode = self.modes[0]
        self.static: Any = None
        self.merged = False
        self.ends = False  # whether end-of-sequence tokens may be chosen
        self.known_head: Head | None = None
        self.head_is_known = False  # until the first logits

    def _load(self, artifact: Path, device: str) -> PreTrainedModel:
        """Load the model, and set `compute_type`. Raises `UserError` where it cannot be loaded whole."""
        self.compute_type = str(self.dtype).removeprefix("torch.")
        if self.streamed:
            return self.streamed.model
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                artifact,
                dtype=self.dtype,
                output_loading_info=True,
                **self.attention,
                **self.load_options(artifact, device),
            )
        except Exception as error:  # its model classes raise many kinds
            raise UserError(f"{artifact}: {self.name} cannot load it ({first_line(error)})") from None
        wrong = sorted({*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])})
        if wrong:
            raise UserError(
                f"{artifact}: lacks {', '.join(wrong[:3])}, which would be random; download the model again"
            )
        return model

    def default_dtype(self, artifact: Path, device: str) -> torch.dtype:
        """Return the dtype to calculate in where the options name none. A quantized artifact of weights that float16
        cannot hold says bfloat16; of plain ones, the loaded weights show it."""
        said = None if self.plain else shards.read_config(artifact / "config.json").get("dtype")
        return torch.bfloat16 if device == "cuda" and said == "bfloat16" else DTYPES[device]

    def load_options(self, artifact: Path, device: str) -> dict[str, Any]:
        """Return further arguments for transformers: quantized layers are loaded onto their device directly."""
        return {} if self.plain else {"device_map": {"": device}}

    def _modes(self) -> tuple[str, ...]:
        if self.device == "cpu":  # a static cache would only add the masked positions' work
            return ("generate",)
        from quantmill.engines.decoding.static_cache import StaticDecode

        return ("generate", "captured") if StaticDecode.fits(self.model) else ("generate",)

    def _cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        if self.ends:
            yield from self._step(prompts, n)
        elif self.mode == "captured" and len(prompts) == 1:
            for token, at in self._static(len(prompts[0]) + n).tokens(prompts[0], n):
                yield 0, token, at
        else:
            yield from self._generate(prompts, n)

    def _generate(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        """Decode by `generate`, which passes on each step's tokens as soon as they are on the host."""
        ids = torch.tensor(prompts, device=self.device)
        ends = {"eos_token_id": self.stop_ids, "min_new_tokens": n} if self.stop_ids else {}
        steps = Steps()
        asked = ends | {"do_sample": False, "max_new_tokens": n, "pad_token_id": 0}
        self._call_generate(ids, attention_mask=torch.ones_like(ids), streamer=steps, **asked)
        for tokens, at in steps.came[1:]:  # the prompts come first
            for number, token in enumerate(tokens):
                yield number, token, at

    def _call_generate(self, ids: torch.Tensor, **options: Any) -> None:
        self.model.generate(ids, **options)

    def _static(self, positions: int) -> Any:
        """Return the recorded step for at least `positions`."""
        if self.static is None or self.static.positions < positions:
            from quantmill.engines.decoding.static_cache import StaticDecode

            self.static = None
            gc.collect()  # free its memory first: a cache and its layers refer to each other
            if not self.merged:
                self._merge()
                self.merged = True
                torch.cuda.empty_cache()  # the layers that were merged
            self.static = StaticDecode(self.model, positions, self.stop_ids)
        return self.static

    def _merge(self) -> None:
        """Make one product of the layers that read the same input, which only a recorded step does."""
        if self.plain:
            merge(self.model, torch.nn.Linear)

    @torch.inference_mode()
    def _step(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        """Call the model for each step, so that the caller can stop at any token."""
        cache = self._cache()
        step = torch.tensor(prompts, device=self.device)
        for _ in range(n):
            logits = self.model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            step = logits.argmax(-1, keepdim=True)
            tokens, at = step.flatten().tolist(), time.perf_counter()  # tolist() waits for the device
            for number, token in enumerate(tokens):
                yield number, token, at

    def logits(self, ids: list[int]) -> Iterator[Any]:
        if head := self.head(ids):  # the whole window through the body, a chunk of it through the head
            for states in self.states(ids):
                yield head.logits(states)
            return
        tokens = self._send([ids])
        cache = self._cache()  # so that the logits of only one chunk are in memory
        for chunk in tokens.split(engines.chunk_positions(self.vocab_size, self.device), dim=1):
            yield self._deliver(self._run(self.model, input_ids=chunk, past_key_values=cache, use_cache=True).logits[0])

    def read_ahead(self, texts: Sequence[list[int]]) -> None:
        if not self.streamed:
            return
        first = self._send([texts[0][:PROBE]])
        probe = [] if self.head_is_known else [partial(self._body, first), partial(self._own_logits, first)]
        self.streamed.choose_place(sum(map(len, texts)))
        found = self.streamed.run([*(partial(self._kept_body, ids) for ids in texts), *probe])
        if probe:
            self.known_head, self.head_is_known = self._find_head(*found[-2:]), True
        if not self.known_head:
            raise UserError(f"{self.streamed.artifact}: cannot run block by block: its logits are not its head's alone")
        for ids, states in zip(texts, found[: len(texts)], strict=True):
            self.ahead.setdefault(tuple(ids), []).append(states)

    def _kept_body(self, ids: list[int]) -> Callable[[], torch.Tensor]:
        """Run a text, and return what returns its states."""
        states = self._body(self._send([ids]))
        return shelf.put(states) if self.streamed and self.streamed.on_disk else lambda: states

    def states(self, ids: list[int]) -> Iterator[Any]:
        if self.streamed:
            if not self.ahead.get(tuple(ids)):
                self.read_ahead([ids])
            yield from self.ahead[tuple(ids)].pop()().split(engines.chunk_positions(self.vocab_size, self.device))
            return
        yield from self._body(self._send([ids])).split(engines.chunk_positions(self.vocab_size, self.device))

    def _body(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the states [positions, hidden] that the head reads."""
        # without a cache transformers asks the GPU whether several texts are packed into one, and waits for it
        cached = self.device == "cuda" and not self.streamed and tokens.shape[1] <= BATCH["cuda"]
        options = {"past_key_values": self._cache(), "use_cache": True} if cached else {"use_cache": False}
        return self._run(self.model.base_model, input_ids=tokens, **options).last_hidden_state[0]

    def _own_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the model's float32 logits [positions, vocab], as its class makes them."""
        return self._run(self.model, input_ids=tokens, use_cache=False).logits[0].float()

    def logits_of_last_tokens(self, texts: list[list[int]], counts: list[int]) -> Iterator[tuple[int, Any]]:
        head = self.head(texts[0])
        if not head or self.streamed:
            yield from super().logits_of_last_tokens(texts, counts)
            return
        size = engines.chunk_positions(self.vocab_size, self.device)
        for batch in self._batches(texts):
            # no position attends to its right, so any padding there will do
            longest = max(len(texts[number]) for number in batch)
            filled = [texts[number] + [0] * (longest - len(texts[number])) for number in batch]
            tokens = self._send(filled)
            hidden = self._run(self.model.base_model, input_ids=tokens, use_cache=False).last_hidden_state
            for row, number in enumerate(batch):
                end = len(texts[number])
                for chunk in hidden[row, end - counts[number] : end].split(size):
                    yield number, head.logits(chunk)

    def _batches(self, texts: list[list[int]]) -> Iterator[list[int]]:
        """Yield the numbers of texts that run together, in order: at most `BATCH` tokens, padding included."""
        batch: list[int] = []
        longest = 0
        for number, ids in enumerate(texts):
            longest = max(longest, len(ids))
            if batch and longest * (len(batch) + 1) > BATCH[self.device]:
                yield batch
                batch, longest = [], len(ids)
            batch.append(number)
        yield batch

    def allow_eos(self) -> bool:
        self.ends, self.stop_ids, self.static = True, [], None
        return True

    def _send(self, texts: list[list[int]]) -> torch.Tensor:
        """Return texts of one length on the device. From pinned memory a GPU takes them while the host goes on."""
        tokens = torch.tensor(texts)
        return tokens.pin_memory().to(self.device, non_blocking=True) if self.device == "cuda" else tokens

    @torch.inference_mode()  # not on the generator: there it holds a chunk while the next one is made
    def _run(self, module: torch.nn.Module, *inputs: torch.Tensor, **options: Any) -> Any:
        return module(*inputs, **options)

    def _deliver(self, logits: torch.Tensor) -> Any:
        logits = logits.float()
        return logits.numpy() if self.device == "cpu" else logits

    def head(self, ids: list[int]) -> Head | None:
        if not self.head_is_known and self.streamed:
            self.read_ahead([ids])
        elif not self.head_is_known:
            first = self._send([ids[:PROBE]])
            if self.model.base_model is not self.model:
                self.known_head = self._find_head(self._body(first), self._own_logits(first))
            self.head_is_known = True
        return self.known_head

    def _find_head(self, hidden: torch.Tensor, own: torch.Tensor) -> Head | None:
        """Return the head if its logits of the last hidden states are the model's own within the last bits."""
        layer = self.model.get_output_embeddings()
        if not isinstance(layer, torch.nn.Linear):
            return None
        found = Head.of_config(layer.weight, layer.bias, self.model.config.get_text_config().to_dict())
        last_bits = LAST_BITS * torch.finfo(self.dtype).eps * own.abs().max()
        return found if bool(((torch.as_tensor(found.logits(hidden)) - own).abs() <= last_bits).all()) else None

    def weight_bytes(self) -> int:
        embeddings, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        untied = head is not None and head.weight is not embeddings.weight
        config = self.model.config.get_text_config().to_dict()
        total = sum(round(nbytes * share_read(name, config)) for name, nbytes in self.held_bytes().items())
        return total - (embeddings.weight.nbytes if untied else 0)

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of all weights, as loaded, by their names."""
        return {name: each.nbytes for name, each in self.model.named_parameters()}

    def footprint(self) -> Footprint | None:
        ids = torch.zeros(1, PROBE, dtype=torch.long, device=self.device)
        layers = kept.layers(self._run(self.model, input_ids=ids, use_cache=True).past_key_values)
        # of a window it keeps one token less: the next one is of the window too
        return Footprint(sum(self.held_bytes().values()), Cache(layers, beyond=-1) if layers else None)

    def peak_allocated_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else None

    def versions(self) -> dict[str, str]:
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attention": self.model.config._attn_implementation,
            **({"weights": "block by block"} if self.streamed else {}),
            **(self.static.versions() if self.static and self.static.captured else {}),
        }

    def close(self) -> None:
        del self.model
        self.streamed, self.ahead = None, {}
        self.static = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
