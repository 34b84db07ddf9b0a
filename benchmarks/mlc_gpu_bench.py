"""Shared parts of mlc_gpu.py: a clock for recorded calls, random weights, and a measure of error."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO / "scripts"))

import numpy as np  # noqa: E402
import tvm  # noqa: E402

from quantmill.engines.decoding.cuda_stream import Stream  # noqa: E402
from quantmill.mlc import library  # noqa: E402

REPLAYS = 20
EPSILON = 1e-5
RANDOM = np.random.default_rng(0)


class Bench:
    """A device that times recorded calls."""

    def __init__(self, device: tvm.runtime.Device) -> None:
        self.device = device
        self.empty((1,), "int32")  # a stream wants the context that the first allocation makes
        self.stream = Stream(device)
        self.target = library.cuda_target(None)
        self.warpgroups = str(self.target.attrs["arch"]) == library.WARPGROUPS

    def tensor(self, array: np.ndarray) -> tvm.runtime.Tensor:
        return tvm.runtime.tensor(array, self.device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> tvm.runtime.Tensor:
        return self.tensor(np.zeros(shape, dtype))

    def compile(self, functions: dict[str, tvm.tirx.PrimFunc]) -> Any:
        """Compile a module; return its functions by name."""
        module = tvm.IRModule({name: made.with_attr("global_symbol", name) for name, made in functions.items()})
        with self.target:
            return tvm.compile(library.launches(self.target)(module), self.target)

    def microseconds(self, calls: list[Callable[[], object]]) -> float:
        """Return the microseconds per call, in a recording of all."""

        def once() -> None:
            for call in calls:
                call()

        once()
        self.device.sync(self.stream.handle.value)
        recording = self.stream.record(once)
        best = float("inf")
        for _ in range(3):
            self.stream.replay(recording)
            self.device.sync(self.stream.handle.value)
            start = time.perf_counter()
            for _ in range(REPLAYS):
                self.stream.replay(recording)
            self.device.sync(self.stream.handle.value)
            best = min(best, time.perf_counter() - start)
        self.stream.forget(recording)
        return best / REPLAYS / len(calls) * 1e6


def random_matrix(outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw words without the nibble 15, and scales, whose product is about as large as the vector."""
    words = RANDOM.integers(0, 2**32, (outputs, inputs // 8), dtype=np.uint32) & np.uint32(0xEEEEEEEE)
    scales = RANDOM.uniform(0.5, 1.5, (outputs, inputs // 32)) / (5 * inputs**0.5)
    return words, scales.astype(np.float16)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference over the root mean square of the expected values."""
    return float(np.abs(found.astype(np.float32) - wanted).max() / np.sqrt(np.mean(wanted**2)))
