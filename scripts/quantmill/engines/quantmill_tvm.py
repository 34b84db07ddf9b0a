"""MLC's format q4f16_1 with Quantmill's own kernels, which TVM runs: the library `model_lib.so` beside the weights.

It is not MLC-LLM, and its speed is not MLC-LLM's.
"""

import ctypes
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

# Read at import: the compiler's 250 MB are not needed here, and threads must not be bound to cores that others use
os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")
os.environ.setdefault("TVM_BIND_THREADS", "0")
os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")  # for libraries that hold source

from quantmill.mlc import without_torch

with without_torch():
    import tvm
    from tvm.runtime.vm import VirtualMachine
    from tvm_ffi.libinfo import load_lib_ctypes

from quantmill import engines
from quantmill.common.program import UserError, first_line
from quantmill.devices import cpu, cuda
from quantmill.engines.decoding.cuda_stream import Stream
from quantmill.metrics.footprint import VALUE_BYTES, Cache, Footprint, Layers
from quantmill.mlc import architecture, cpu_layout, shards

LIBRARY = "model_lib.so"
TILE = 64  # positions; capacities are multiples of it (`mlc.cpu_attention.KEYS`)
CHUNK = 2048  # positions that a GPU reads at a time


class Engine(engines.Engine):
    """See `engines.Engine`."""

    modes = ("compiled",)

    def __init__(self, artifact: Path, device: str, threads: int) -> None:
        served = architecture.of_artifact(artifact)
        self.shape, self.context = served.architecture, served.context
        if device == "cuda":
            load_cuda()
        tvm_device = tvm.cuda() if device == "cuda" else tvm.cpu()
        set_threads(threads)
        try:
            machine = VirtualMachine(tvm.runtime.load_module(str(artifact / LIBRARY)), tvm_device)
        except Exception as error:  # the loader raises many kinds
            raise UserError(f"{artifact / LIBRARY}: TVM cannot load it ({first_line(error)}); build it again") from None
        self.library = json.loads(machine["metadata"]())
        self._check_library(artifact, device)
        bias = np.zeros(self.shape.vocab_size, np.float32)
        self.stop_ids = served.stop_ids
        bias[self.stop_ids] = -np.inf
        arrays = shards.read(artifact, self.shape.parameters())
        session = CudaSession if device == "cuda" else CpuSession
        self.session = session(machine, tvm_device, self.shape, arrays, bias)
        self.compute_type = session.compute_type

    def _check_library(self, artifact: Path, device: str) -> None:
        """Raise `UserError` where the library is for another model, device or processor."""
        built = self.library
        if built["architecture"] != json.loads(json.dumps(asdict(self.shape))):
            raise UserError(f"{artifact / LIBRARY}: was compiled for another architecture; build it again")
        if built["device"] != device:
            raise UserError(f"{artifact / LIBRARY}: was compiled for {built['device']}, not {device}; build it again")
        missing = set(built["features"]) - set(cpu.features())
        if missing:
            raise UserError(
                f"{artifact / LIBRARY}: was compiled for a processor with {', '.join(sorted(missing))}, which this one "
                "lacks; build it again here"
            )

    def _check_length(self, positions: int) -> None:
        if positions > self.context:
            raise UserError(f"{positions} positions exceed the context of {self.context}; lower the number of tokens")

    def decode(self, prompts: list[list[int]], n: int) -> Iterator[tuple[int, int, float]]:
        (ids,) = prompts
        self._check_length(len(ids) + n)
        self.session.start(len(ids) + n)
        for token in self.session.tokens(ids, n):
            yield 0, token, time.perf_counter()

    def logits(self, ids: list[int]) -> Iterator[Any]:
        self._check_length(len(ids))
        self.session.start(len(ids))
        size = engines.chunk_positions(self.shape.vocab_size, self.library["device"])
        for start in range(0, len(ids), size):
            yield self.session.score(ids[start : start + size])

    def allow_eos(self) -> bool:
        self.stop_ids = []
        self.session.allow_all()
        return True

    def weight_bytes(self) -> int:
        tied = self.shape.tie_word_embeddings
        sizes = zip(self.shape.parameters(), self.session.parameters, strict=True)
        return sum(nbytes(tensor) for name, tensor in sizes if tied or not name.startswith("model.embed_tokens."))

    def footprint(self) -> Footprint:
        shape, size = self.shape, VALUE_BYTES[self.compute_type]
        layers = Layers(shape.num_hidden_layers, 2 * shape.num_key_value_heads * shape.head_dim * size)
        return Footprint(sum(map(nbytes, self.session.parameters)), Cache([layers], page=TILE))

    def versions(self) -> dict[str, str]:
        return {"apache-tvm": tvm.__version__, "target": self.library["target"]}

    def close(self) -> None:
        del self.session


def load_cuda() -> None:
    """Load TVM's CUDA runtime, which TVM does not load without its compiler.

    Raises `UserError` where a CUDA library is missing, or TVM sees no GPU.
    """
    try:
        paths = tvm.libinfo.package_lib_paths()
        load_lib_ctypes("tvm", "tvm_runtime_cuda", "RTLD_LOCAL", extra_lib_paths=paths)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"device cuda: TVM's CUDA runtime does not load ({first_line(error)}); name the folder of what it lacks "
            "in LD_LIBRARY_PATH"
        ) from None
    if not tvm.cuda().exist:
        raise UserError(f"device cuda: TVM {tvm.__version__} sees no GPU; use device: cpu")


def set_threads(threads: int) -> None:
    """Let TVM use `threads` CPU threads.

    Its pool is made once, of the number in the variable, which is therefore set to all processors first. TVM reads the
    variable again at every parallel loop: if unset, it asks the system each time, which took half of the demo's
    decoding; with 1, loops are serial.
    """
    os.environ["TVM_NUM_THREADS"] = str(max(threads, cpu.available_threads()))
    tvm.get_global_func("runtime.config_threadpool")(1, threads)
    os.environ["TVM_NUM_THREADS"] = str(threads)


def nbytes(tensor: Any) -> int:
    """Return the bytes of a TVM tensor."""
    return int(np.prod(tensor.shape)) * np.dtype(str(tensor.dtype)).itemsize


class Session:
    """One sequence in a contiguous cache; the library changes its arguments in place."""

    compute_type: str

    def __init__(
        self,
        machine: VirtualMachine,
        device: tvm.runtime.Device,
        shape: architecture.Architecture,
        arrays: dict[str, np.ndarray],
        bias: np.ndarray,
    ) -> None:
        """`arrays`: parameters in the library's order; `bias` [vocab]: added to logits before a token is chosen."""
        self.device, self.shape = device, shape
        self.functions = {name: machine[name] for name in ("prefill", "decode", "score")}
        self.parameters = [self._tensor(self._pack(array)) for array in arrays.values()]
        self.bias = self._tensor(self._pad(bias))
        self.token, self.position = self._tensor(np.zeros((1, 1), np.int32)), self._tensor(np.zeros(1, np.int32))
        self.counters: tuple[Any, ...] = ()  # the kernels' counters, before the cache among their arguments
        self.capacity = 0

    def _tensor(self, array: np.ndarray) -> Any:
        return tvm.runtime.tensor(array, self.device)

    def _pack(self, array: np.ndarray) -> np.ndarray:
        """Return a parameter as the kernels read it."""
        return array

    def _pad(self, bias: np.ndarray) -> np.ndarray:
        """Return the bias, padded to the kernels' rows of logits."""
        return bias

    def _new_cache(self) -> tuple[Any, ...]:
        """Return the keys and values of every layer for `capacity` positions."""
        raise NotImplementedError

    def allow_all(self) -> None:
        """Allow every token from now on; a recorded step reads the same memory."""
        self.bias.copyfrom(self._pad(np.zeros(self.shape.vocab_size, np.float32)))

    def _set_position(self, position: int) -> None:
        self.position.copyfrom(np.array([position], np.int32))

    def start(self, positions: int) -> None:
        """Forget what was read, and make room."""
        if positions > self.capacity:
            self.capacity = -(-positions // TILE) * TILE
            self.cache = self._new_cache()
            self.step = (self.token, self.position, self.bias, *self.counters, *self.cache, self.parameters)
            self._prepare()
        self._set_position(0)

    def _prepare(self) -> None:
        """Prepare the first step after a change of capacity."""

    def _read(self, ids: list[int]) -> None:
        self.functions["prefill"](self._tensor(np.array([ids], np.int32)), *self.step)

    def _decode(self) -> None:
        self.functions["decode"](*self.step)

    def tokens(self, ids: list[int], n: int) -> Iterator[int]:
        """Read `ids` and yield the `n` tokens after them."""
        raise NotImplementedError

    def score(self, ids: list[int]) -> Any:
        """Read `ids` and return the logits [len(ids), vocab] of their positions: an array, or a tensor on the GPU if
        the environment has torch."""
        tokens = self._tensor(np.array([ids], np.int32))
        arguments = (tokens, self.position, *self.counters, *self.cache, self.parameters)
        made = self.functions["score"](*arguments)
        torch = cuda.torch() if self.device == tvm.cuda() else None
        logits = torch.from_dlpack(made)[0] if torch else made.numpy()[0]
        self._set_position(int(self.position.numpy()[0]) + len(ids))
        return logits[:, : self.shape.vocab_size]


class CpuSession(Session):
    """A session of libraries of `mlc.cpu.Model`."""

    compute_type = "float32"

    def _pack(self, array: np.ndarray) -> np.ndarray:
        return cpu_layout.pack(array) if array.ndim == 2 else array

    def _pad(self, bias: np.ndarray) -> np.ndarray:
        room = cpu_layout.padded_rows(len(bias)) - len(bias)
        return np.pad(bias, (0, room), constant_values=-np.inf)

    def _new_cache(self) -> tuple[Any, ...]:
        shape = self.shape
        heads, size = (shape.num_hidden_layers, shape.num_key_value_heads), shape.head_dim
        sizes = (*heads, size, self.capacity), (*heads, self.capacity, size)
        return tuple(tvm.runtime.empty(each, "float32") for each in sizes)

    def tokens(self, ids: list[int], n: int) -> Iterator[int]:
        view = np.from_dlpack(self.token)
        self._read(ids)
        yield int(view[0, 0])
        for _ in range(n - 1):
            self._decode()
            yield int(view[0, 0])


class CudaSession(Session):
    """A session of libraries of `mlc.cuda.Model`.

    A step takes nothing from the host and leaves the token where the next one reads it. So it is recorded once for each
    capacity, and replayed while the previous token is copied to the host.
    """

    compute_type = "float16"

    def __init__(self, machine: VirtualMachine, device: tvm.runtime.Device, *model: Any) -> None:
        super().__init__(machine, device, *model)
        self.counters = (self._tensor(np.zeros(self.shape.num_key_value_heads, np.int32)),)
        self.stream = Stream(device) if device == tvm.cuda() else None
        self.recording: ctypes.c_void_p | None = None

    def _new_cache(self) -> tuple[Any, ...]:
        shape = self.shape
        size = (shape.num_hidden_layers, shape.num_key_value_heads, self.capacity, shape.head_dim)
        return tuple(tvm.runtime.empty(size, "float16", self.device) for _ in range(2))

    def _prepare(self) -> None:
        if self.stream is None:
            return
        if self.recording is not None:
            self.stream.forget(self.recording)
        self._decode()
        self.recording = self.stream.record(self._decode)

    def tokens(self, ids: list[int], n: int) -> Iterator[int]:
        for start in range(0, len(ids), CHUNK):
            self._read(ids[start : start + CHUNK])
        for number in range(n):
            if self.stream is None or self.recording is None:
                if number:
                    self._decode()
                yield int(self.token.numpy()[0, 0])
                continue
            self.stream.fetch(self.token)
            if number + 1 < n:
                self.stream.replay(self.recording)
            yield self.stream.wait()
