"""A CUDA stream that TVM launches its kernels on, and recordings of what it launches there.

Function names and signatures: CUDA Driver API reference.
"""

import ctypes
from collections.abc import Callable

import numpy as np
import tvm

from quantmill.common.program import UserError

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Stream:
    """A stream that waits for copies on the default stream, as they wait for it."""

    def __init__(self, device: tvm.runtime.Device) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.handle, self.event = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self.handle), 0)
        self._call("cuEventCreate", ctypes.byref(self.event), 0)
        device.set_raw_stream(self.handle.value)
        page = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(page), ctypes.c_size_t(4), 0)
        self.page = page
        self.value = np.ctypeslib.as_array(ctypes.cast(page, ctypes.POINTER(ctypes.c_int32)), (1,))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self.driver, name)(*arguments)
        if status:
            raise UserError(f"CUDA driver: {name} failed with error {status}")

    def record(self, step: Callable[[], object]) -> ctypes.c_void_p:
        """Record what `step` launches as a graph that can be replayed. It must have run before, so that memory
        exists."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self.handle, RELAXED)
        step()
        self._call("cuStreamEndCapture", self.handle, ctypes.byref(graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        self._call("cuGraphDestroy", graph)
        return executable

    def replay(self, executable: ctypes.c_void_p) -> None:
        """Launch a recording."""
        self._call("cuGraphLaunch", executable, self.handle)

    def forget(self, executable: ctypes.c_void_p) -> None:
        """Free a recording."""
        self._call("cuGraphExecDestroy", executable)

    def fetch(self, tensor: tvm.runtime.Tensor) -> None:
        """Begin to copy an int32 to the host, after everything launched so far."""
        address = ctypes.c_uint64(tensor.data_ptr())
        self._call("cuMemcpyDtoHAsync_v2", self.page, address, ctypes.c_size_t(4), self.handle)
        self._call("cuEventRecord", self.event, self.handle)

    def wait(self) -> int:
        """Wait for the last `fetch`, and return its number."""
        self._call("cuEventSynchronize", self.event)
        return int(self.value[0])
