"""Decoding over a KV cache that never moves, so that a step can be captured in a CUDA graph and replayed."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from quantmill.common.program import first_line
from quantmill.engines import CannotDecode
from quantmill.engines.decoding.attention import SHARED_HEADS
from quantmill.engines.decoding.fused import Write, fuse, write_cache

ALIGNMENT = 64  # positions; attention kernels need aligned rows of the mask
WARM_UP = 3  # steps before the capture, in which kernels choose and allocate what they need


class _Layer(StaticLayer):
    """A layer's keys and values, written at `decode.slots`, which is set once a step for all layers."""

    def __init__(self, decode: "StaticDecode") -> None:
        super().__init__(decode.positions)
        self.decode = decode

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        write = self.decode.write if keys.shape[2] == 1 else write_cache
        write(self.keys, self.values, keys, values, self.decode.slots)
        return self.keys, self.values


class StaticDecode:
    """Quantmill's greedy decoding of a model over a static KV cache, with or without a CUDA graph, in the same
    arithmetic. transformers decodes differently: this speed is not that of transformers.

    The step takes its token and its position from tensors and leaves the next ones there, so that one recording of it
    serves every position. What lies beyond the position is masked, and may be left from an earlier prompt.
    """

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Return whether every layer of a model attends to all positions by PyTorch's attention, whose name can be
        replaced: a model that tests for that name would take the replacement for an attention without a mask."""
        layers = StaticCache(config=model.config, max_cache_len=ALIGNMENT).layers
        named = model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation()
        return named and all(type(layer) is StaticLayer for layer in layers)

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, positions: int, stop_ids: list[int], *, captured: bool = True) -> None:
        """Allocate a cache of at least `positions`; `stop_ids` are never chosen.

        `captured` fuses permanently what can be fused without another result, and records the step; it needs a GPU.
        Without it, Python runs each step; tests compare that arithmetic with `generate`. Raises `CannotDecode` where a
        step cannot be recorded.
        """
        device = model.device
        model.config._attn_implementation = SHARED_HEADS
        self.model, self.device, self.captured = model, device, captured
        self.positions = -(-positions // ALIGNMENT) * ALIGNMENT
        self.token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.long, device=device)
        self.all_positions = torch.arange(self.positions, device=device)
        self.slots = self.all_positions
        layers = model.config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[_Layer(self) for _ in range(layers)])
        self.write: Write = write_cache
        self.fused: list[str] = []
        self.step: Callable[[], None] = self._step
        if captured:
            self.write, self.fused = fuse(model)
            try:
                self.step = self._capture().replay
            except RuntimeError as error:  # a step that waits for the host, or whose shapes depend on values
                raise CannotDecode(f"its step cannot be captured: {first_line(error)}") from None

    def _capture(self) -> torch.cuda.CUDAGraph:
        self._prefill([0])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Run the model on `ids` [1, n] at `positions` [n], and leave its choice of the next token in `token`."""
        self.slots = positions
        seen = self.all_positions <= positions[:, None]
        # as numbers: every layer would make these from booleans again
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=self.device).masked_fill_(~seen, -torch.inf)
        output = self.model(
            input_ids=ids,
            position_ids=positions[None],
            attention_mask=mask[None, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[0, -1].index_fill_(0, self.stop_ids, -torch.inf)
        self.token.copy_(logits.argmax().view(1, 1))

    def _step(self) -> None:
        self._forward(self.token, self.position[0])
        self.position.add_(1)

    def _prefill(self, ids: list[int]) -> None:
        self._forward(torch.tensor([ids], device=self.device), self.all_positions[: len(ids)])
        self.position.fill_(len(ids))

    def versions(self) -> dict[str, str]:
        """Return whose decoding it is, and what is fused."""
        return {"decoding": "Quantmill's CUDA graph", "fused": ", ".join(self.fused) or "nothing"}

    @torch.inference_mode()
    def tokens(self, ids: list[int], n: int) -> Iterator[tuple[int, float]]:
        """Yield `n` tokens with their times, as `engines.Engine.decode` says.

        A recorded step needs nothing from the host, so the next one is launched before the token is waited for. A step
        that Python runs would delay the token instead.
        """
        cuda = self.device.type == "cuda"
        arrived = torch.zeros(n, dtype=torch.long, pin_memory=cuda)
        self._prefill(ids)
        for number in range(n):
            arrived[number : number + 1].copy_(self.token.view(1), non_blocking=True)
            ready = torch.cuda.current_stream().record_event() if cuda else None
            if self.captured and number + 1 < n:
                self.step()
            if ready is not None:
                ready.synchronize()
            yield int(arrived[number]), time.perf_counter()
            if not self.captured and number + 1 < n:
                self.step()
