"""Record the traffic between an engine and a real server, and replay it.

    python tests/helpers/transcript.py URL OUT    beside a real server: what is sent to the printed port is kept in OUT

A transcript is JSON: `server` and its version, `origin` (`recorded`, or `written` by hand from the `source`),
`options` of the run, `told`, what the engine is to say, and `exchanges`, each in the order of the session: `method`,
`path`, `body`, and the answer's `status`, `type` and `chunks`. Replayed, another request than the next one is refused.
"""

import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Exchange = dict[str, Any]
Answer = Callable[[str, str, Any, dict[str, str]], Exchange]


@contextmanager
def listen(answer: Answer) -> Iterator[str]:
    """Yield the URL of a server that gives the answers of `answer(method, path, body, headers)`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(size)) if size else None
            found = answer(self.command, self.path, body, dict(self.headers))
            self.send_response(found["status"])
            self.send_header("Content-Type", found["type"])
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in (*found["chunks"], ""):
                data = chunk.encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        do_GET = do_POST = do

        def log_message(self, *words: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Replay:
    """Answers of a transcript, in order. `wrong`: differences of requests; `left`: unused answers."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self.left, self.wrong, self.headers = list(exchanges), "", [{}]

    def __call__(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Exchange:
        self.headers.append(headers)
        asked = {"method": method, "path": path, "body": body}
        due = self.left[0] if self.left else {}
        if asked != {name: due.get(name) for name in asked}:
            self.wrong = self.wrong or f"asked {asked}, due { ({name: due.get(name) for name in asked}) }"
            return {"status": 400, "type": "text/plain", "chunks": [self.wrong]}
        return self.left.pop(0)


def record(url: str, out: Path) -> None:
    """Pass requests on to a server until the standard input ends, and write what went over the wire."""
    exchanges: list[Exchange] = []

    def answer(method: str, path: str, body: Any, headers: dict[str, str]) -> Exchange:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            reply = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            reply = error
        with reply:
            lines = [line.decode() for line in reply]
            said = {"status": reply.status, "type": reply.headers["Content-Type"]}
        exchanges.append({"method": method, "path": path, "body": body, **said, "chunks": lines})
        return exchanges[-1]

    with listen(answer) as here:
        print(here, flush=True)
        sys.stdin.read()
    out.write_text(json.dumps({"exchanges": exchanges}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
