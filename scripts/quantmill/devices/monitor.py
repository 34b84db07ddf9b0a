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
    """Samples in a thread of this process, from `with` to its end. A CPU that tells nothing gets no thread.

    `company` is what was found on the GPU when no process of ours that measures was there, in words.

    `server` is the one that is measured where somebody else runs it: its processes are no company. Where they are not
    known, nobody is called company, and nothing that this machine's device tells is held to be of a server elsewhere.
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
        """What a process measured under: `conditions`, and `interference` in words.

        Args:
            load: what the host did beside it (`host_load.Load` as a mapping), where that is known.
            measured: start and end of its measured runs, by `time.perf_counter()`.
            decode_phases: from first to last token of each run that energy counts for, by the same clock.
            own: the processes that measured.
        """
        during = conditions.select(self.samples, *measured)
        elsewhere = self.server is not None and self.server.place == "elsewhere"
        most = conditions.OTHERS_BESIDE_GPU if self.gpu or elsewhere else conditions.OTHERS
        beside, seen = Load(**load) if load else None, during
        if self.server and self.server.unknown:
            seen = [replace(sample, processes=None) for sample in during]
            if beside and not elsewhere:
                beside = replace(beside, others=0.0)  # the server is among them
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
