"""Put one start of a server under all loads, as a process of loads.measure, which passes it a `LoadTask`.

This process is the client, so nothing else runs in it: its parent samples the device. The answer is a `StartResult`.
"""

import resource
import sys

from quantmill import engines
from quantmill.common.program import UserError, command
from quantmill.devices import cpu, cuda, processes
from quantmill.devices.fresh_process import answer_task
from quantmill.engines.served.served import Served
from quantmill.loads import server_start
from quantmill.loads.job import LoadTask, StartResult
from quantmill.loads.server_start import Loader

COMMAND = command("loads.worker")


def raise_file_limit() -> None:
    """Let this process open as many files as it may: each request in flight has a connection, and 1,024 are usual."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def load(job: LoadTask) -> StartResult:
    """Start the server, and put it under every load. Raises `UserError` for an engine that is not a server."""
    cpus = cpu.processors()
    plan = job.plan()
    engine = engines.load(job.engine, job.artifact, job.device, job.threads, job.gpus, **job.options)
    if not isinstance(engine, Served):
        raise UserError(f"engine {job.engine} is not a server; loads are for servers")
    raise_file_limit()  # after the server's start, which keeps the limit that its users would give it
    try:
        loader = Loader(engine, plan, job.ceiling, cpus)
        say = lambda name: print(f"start {job.number + 1}: {name}", file=sys.stderr)  # noqa: E731
        found = server_start.run(loader, engine.startup_s, job.number == 0, job.loads["limits"], say)
        memory = (
            cuda.used_bytes() if job.device == "cuda" and engine.here else processes.peak_rss_bytes(engine.processes())
        )
        footprint = engine.footprint() if job.number == 0 else None
        kept = footprint.cache.bytes_per_token() if footprint and footprint.cache else None
        return StartResult(found, memory, engine.compute_type, engine.versions(), engine.threads, kept)
    finally:
        engine.close()


def main() -> None:
    answer_task(load)
