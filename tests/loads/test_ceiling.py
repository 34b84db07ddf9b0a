"""The client's cost of an arrival, compared with a loop that only reads, because processors differ fivefold."""

import selectors
import socket
import subprocess
import sys
import time

import pytest

from quantmill.loads import client_ceiling

EVENTS, PACE = 100, 20_000  # to each connection; a second, to all together


def bare() -> float:
    """Arrivals for each second of processor time, of a loop that reads what comes and does nothing with it."""
    command = [sys.executable, client_ceiling.NULL_SERVER, str(client_ceiling.CONNECTIONS), str(EVENTS), str(PACE)]
    buffer, arrivals = bytearray(2**18), 0
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        selectors.DefaultSelector() as selector,
    ):
        address = "127.0.0.1", int(server.stdout.readline())
        connections = [socket.create_connection(address) for _ in range(client_ceiling.CONNECTIONS)]
        for each in connections:
            each.sendall(b"GET / HTTP/1.1\r\n\r\n")
            each.setblocking(False)
            selector.register(each, selectors.EVENT_READ)
        began = time.process_time()
        while selector.get_map():
            for key, _ in selector.select():
                size = key.fileobj.recv_into(buffer)
                arrivals += 1
                if buffer[max(0, size - 5) : size] == b"0\r\n\r\n":
                    selector.unregister(key.fileobj)
        took = time.process_time() - began
        for each in connections:
            each.close()
    return arrivals / took


@pytest.mark.timing
def test_an_arrival_costs_at_most_three_bare_reads() -> None:
    """In turn, five times each; the fastest of each, as other programs only slow both."""
    least, ours = [], []
    for _ in range(5):
        least.append(bare())
        run = client_ceiling.run(EVENTS, PACE)
        if run.arrivals > 0.9 * EVENTS * client_ceiling.CONNECTIONS:  # events came one by one: nothing held it up
            ours.append(run.arrivals / run.cpu_seconds)
    assert ours
    assert max(ours) > max(least) / 3
