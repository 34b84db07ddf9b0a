"""A server that does to each connection what a function says, byte by byte."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

OK = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def serve(handle: Callable[[socket.socket], None], context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Return the URL of a server on the loopback interface, which speaks TLS if there is a context."""
    listener = socket.create_server(("127.0.0.1", 0))
    tls = context.wrap_socket if context else lambda plain, **_: plain

    def work(connection: socket.socket) -> None:
        # the client closes first, or does not trust a certificate
        with connection, suppress(OSError), tls(connection, server_side=True) as inner:
            handle(inner)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=work, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def answer(data: bytes) -> Callable[[socket.socket], None]:
    """Read a request, and answer so."""

    def handle(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(data)

    return handle


def forever(begin: bytes, again: bytes, seconds: float = 0.0) -> Callable[[socket.socket], None]:
    """Read a request, and answer without an end."""

    def handle(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(begin)
        pause = threading.Event()
        while not pause.wait(seconds):
            connection.sendall(again)

    return handle
