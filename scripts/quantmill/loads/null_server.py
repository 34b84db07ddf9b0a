"""A server that sends the same stream for every request at a given pace: python null_server.py CONNECTIONS EVENTS PACE.
It prints its port. It needs only the standard library."""

import socket
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1800000000,"model":"m",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"token_ids":[12345]}]}\n\n'
)


def serve(connections: int, events: int, pace: float) -> None:
    """Send events to all connections in turn; `pace` is events per second, all connections together."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=connections)
    print(listener.getsockname()[1], flush=True)
    accepted = [listener.accept()[0] for _ in range(connections)]
    for each in accepted:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.recv(65536)
        each.sendall(HEAD)
    chunk = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
    start = time.perf_counter()
    for number in range(events):
        time.sleep(max(0.0, start + number * connections / pace - time.perf_counter()))
        for each in accepted:
            each.sendall(chunk)
    for each in accepted:
        each.sendall(b"0\r\n\r\n")
    accepted[0].recv(1)  # until the client closes


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
