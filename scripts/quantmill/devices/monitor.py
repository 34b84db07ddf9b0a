"""Sample a device while another process measures on it."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from quantmill.devices import conditions, cuda
from quantmill.devices.conditions import Sample
from quantmill.devices.gpu_state import Gpus
from quantmill.devices.host_load import Load
from quantmill.devices.host_state import Host
from quantmill.devices.listeners import Answering

PERIOD = 0.1  # seconds; a GPU's own counters change about as often


class Monitor:
    """Sample the device in a thread while the `with` block runs; a device without sensors gets no samples.

    Attributes:
        company: other users of the GPU before or after the measurement, in words.
        server: the measured server, if it is the user's. Its processes are not company. If they are unknown, no
            process is called company. If it runs on another host, this machine's device is not sampled.
    """

    def __init__(self, device: str, server: Answering | None = None) -> None:
        self.server = server
        here = server is None or server.place == "here"
        self.gpu = Gpus(*cuda.nvml_devices()) if device == "cuda" and here else None
        host = Host() if device == "cpu" and here else None
        self.source = self.gpu or (host if host and host.can_sample() else None)
        self.samples: list[Sample] = []
        self.company = [f"{found} before it started" for found in self._company()]
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _company(self) -> list[str]:
        if self.gpu is None or (self.server and self.server.unknown):
            return []
        return self.gpu.company(self.server.processes() if self.server else ())

    def _run(self) -> None:
        while self.source and not self.ended.wait(PERIOD):
            self.samples.append(self.source.sample())

    def __enter__(self) -> "Monitor":
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self.thread.join()
        self.company = self.company or [f"{found} after it ended" for found in self._company()]

    def describe(
        self,
        load: Mapping[str, Any] | None,
        measured: tuple[float, float],
        decode_phases: Sequence[tuple[float, float]],
        own: Collection[int] = (),
    ) -> dict[str, Any]:
        """Describe the conditions of a measurement: `conditions`, and `interference` in words.

        Args:
            load: load from other processes (`host_load.Load` as a mapping), if known.
            measured: start and end of the measured runs, by `time.perf_counter()`.
            decode_phases: first to last token of each run that counts for energy, by the same clock.
            own: the processes that measured.
        """
        during = conditions.select(self.samples, *measured)
        elsewhere = self.server is not None and self.server.place == "elsewhere"
        most = conditions.OTHERS_BESIDE_GPU if self.gpu or elsewhere else conditions.OTHERS
        beside, seen = Load(**load) if load else None, during
        if self.server and self.server.unknown:
            seen = [replace(sample, processes=None) for sample in during]
            if beside and not elsewhere:
                beside = replace(beside, others=0.0)  # they include the server
        joules, source = conditions.decode_joules(self.samples, decode_phases) or (None, None)
        return {
            "conditions": {
                "host": load,
                "device": conditions.facts(during),
                "decode_joules": joules,
                "energy_from": source,
            },
            "interference": conditions.interference(beside, seen, self.company, most, own),
        }
