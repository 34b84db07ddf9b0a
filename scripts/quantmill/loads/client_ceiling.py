"""The ceiling of the client on this machine: events per second and core, from a server that only sends.

The server is another process (null_server.py), at a pace that leaves the client's core half idle. At a faster pace
several events come in one arrival, which flatters a client. So what counts is arrivals per second of the client's
processor time.
"""

import subprocess
import sys
from pathlib import Path
from statistics import median

from quantmill.client import client
from quantmill.client.schedule import Closed
from quantmill.client.target import Target
from quantmill.common.program import UserError, start_child

NULL_SERVER = Path(__file__).with_name("null_server.py")
CONNECTIONS = 64
EVENTS = 1_000  # to each connection
PACE = 60_000  # events a second, to all connections together
RUNS = 3


def measure(events: int = EVENTS, runs: int = RUNS, pace: int = PACE) -> float:
    """Return the median over the runs. Raises `UserError` if the server does not answer."""
    found = [run(events, pace) for _ in range(runs)]
    return median(each.arrivals / each.cpu_seconds for each in found)


def run(events: int, pace: int) -> client.Recording:
    """Record one run. Raises `UserError` if the server does not answer."""
    command = [sys.executable, NULL_SERVER, CONNECTIONS, events, pace]
    with start_child(command, stdout=subprocess.PIPE, text=True) as server:
        port = next(iter(server.stdout or ()), "1")
        target = Target(f"http://127.0.0.1:{port.strip()}", timeout=60.0)
        recording = client.run(target, [target.request("/", {})] * CONNECTIONS, Closed(CONNECTIONS))
    lost = next((each.failure for each in recording.exchanges if each.failure), None)
    if lost:
        raise UserError(f"the client's ceiling: its own server did not answer ({lost}); is there a loopback interface?")
    return recording
