"""A hub on this machine, for the real huggingface_hub client: HF_ENDPOINT=http://127.0.0.1:PORT.

As much of the protocol as downloads use (API, tree, resolve, HEAD, ETag, Range, SHA-256 of large files, redirects to
another host) and uploads (upload_protocol.py), with faults on demand. What it cannot show: Xet storage, signed
addresses, rate limits of the real hub.
"""

import hashlib
import json
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from upload_protocol import Storage, Uploads, git_blob

LARGE = (
    ".safetensors",
    ".bin",
    ".parquet",
    ".gz",
    ".gguf",
    ".png",
)  # stored apart, under their SHA-256, as the hub does


WRITE_PARQUET = "import json, sys, pyarrow as a; from pyarrow import parquet\n" + (
    "parquet.write_table(a.table({'text': json.load(sys.stdin)}), sys.argv[1])"
)


def parquet_of(rows: list[str], path: Path, tools_python: Path) -> bytes:
    subprocess.run([tools_python, "-c", WRITE_PARQUET, path], input=json.dumps(rows), text=True, check=True)
    return path.read_bytes()


def lines_of(rows: list[str]) -> bytes:
    return "".join(json.dumps({"text": row, "url": "x"}) + "\n" for row in rows).encode()


@dataclass
class Repository:
    """Files of one commit. `token`: the accepted one, or None if none is needed."""

    files: dict[str, bytes]
    revisions: set[str] = field(default_factory=lambda: {"main"})
    token: str | None = None
    gated: bool = False

    @property
    def commit(self) -> str:
        """Return the revision that is a commit, or else a hash of the files."""
        listing = repr(sorted((n, hashlib.sha256(b).hexdigest()) for n, b in self.files.items()))
        pinned = (each for each in self.revisions if re.fullmatch("[0-9a-f]{40}", each))
        return next(pinned, hashlib.sha1(listing.encode()).hexdigest())

    @classmethod
    def of(cls, folder: Path, **options: object) -> "Repository":
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name[0] != "."}
        return cls(files, **options)


@dataclass
class Fault:
    """What happens to requests whose path holds `path`, the first `times` times: `status` is answered, or the
    connection ends after `drop_after` bytes, or a byte is wrong, or each 64 KiB take `delay` seconds, or what was done
    is not answered (`mute`)."""

    path: str
    times: int = 10**9
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    drop_after: int | None = None
    corrupt: bool = False
    delay: float = 0
    body: bytes = b""
    mute: bool = False


class Hub(ThreadingHTTPServer):
    """Serves `repositories` ("models/org/name" or "datasets/org/name"); `log` keeps (method, path, headers)."""

    daemon_threads = True
    kind = Repository

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.storage = Storage()
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.log: list[tuple[str, str, dict[str, str]]] = []
        self.bytes_sent: Counter[str] = Counter()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @staticmethod
    def is_large(name: str) -> bool:
        """Return whether a file is stored in LFS."""
        return name.endswith(LARGE)

    def fault(self, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.path in path and fault.times > 0:
                fault.times -= 1
                return fault
        return None


class Handler(Uploads, BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def note(self) -> tuple[str, "Fault | None"]:
        """Log a request; its path, and the fault that is planted for it."""
        path = unquote(urlsplit(self.path).path)
        self.server.log.append((self.command, path, {key.title(): value for key, value in self.headers.items()}))
        return path, self.server.fault(f"{self.command} {path}")

    def answer(self) -> None:
        path, fault = self.note()
        if fault and fault.status:
            self.send(fault.status, b"", **fault.headers)
        elif path.startswith("/cdn/"):
            self.send_file(path.split("/", 2)[2], fault)
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self.send_info(*match.groups())
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.send_resolved("datasets" if match[1] else "models", match[2], match[3], match[4], fault)
        else:
            self.send(404, b"", **{"X-Error-Code": "EntryNotFound"})

    def repository(self, kind: str, name: str, revision: str | None) -> Repository | None:
        """Return the repository, or None after sending a refusal."""
        found = self.server.repositories.get(f"{kind}/{name}")
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given.startswith("bad"):
            self.send(401, b"", **{"X-Error-Message": "Invalid credentials in Authorization header"})
        elif found is None or (found.token and not found.gated and given != found.token):
            self.send(401 if not given else 404, b"", **{"X-Error-Code": "RepoNotFound"})
        elif found.gated and given != found.token:
            self.send(403 if given else 401, b"", **{"X-Error-Code": "GatedRepo"})
        elif revision not in (None, found.commit, *found.revisions):
            self.send(404, b"", **{"X-Error-Code": "RevisionNotFound"})
        else:
            return found
        return None

    def send_info(self, kind: str, name: str, what: str | None, revision: str | None) -> None:
        found = self.repository(kind, name, revision)
        if not found:
            return
        reply: object
        if what == "tree":
            reply = [
                {"type": "file", "path": file, "size": len(content), "oid": git_blob(content)}
                | ({"lfs": {"oid": sha256(content)} | sizes(content)} if file.endswith(LARGE) else {})
                for file, content in found.files.items()
            ]
        else:
            siblings = [
                {"rfilename": file, "size": len(content), "blobId": git_blob(content)}
                | ({"lfs": {"sha256": sha256(content)} | sizes(content)} if file.endswith(LARGE) else {})
                for file, content in found.files.items()
            ]
            reply = {
                "id": name,
                "sha": found.commit,
                "private": found.token is not None,
                "tags": [],
                "siblings": siblings,
            }
        self.send(200, json.dumps(reply).encode(), **{"Content-Type": "application/json"})

    def send_resolved(self, kind: str, name: str, revision: str, file: str, fault: Fault | None) -> None:
        found = self.repository(kind, name, revision)
        if not found:
            return
        if file not in found.files:
            self.send(404, b"", **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": found.commit})
            return
        content = found.files[file]
        headers = {"X-Repo-Commit": found.commit}
        if not file.endswith(LARGE):
            self.send_content(content, fault, ETag=f'"{git_blob(content)}"', **headers)
            return
        headers |= {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
        other_host = f"http://localhost:{self.server.server_port}"
        self.send(302, b"", Location=f"{other_host}/cdn/{kind}/{name}/{file}", **headers)

    def send_file(self, path: str, fault: Fault | None) -> None:
        kind, name, file = re.fullmatch(r"(models|datasets)/([^/]+/[^/]+)/(.+)", path).groups()
        content = self.server.repositories[f"{kind}/{name}"].files[file]
        self.send_content(content, fault, ETag=f'"{sha256(content)}"')

    def send_content(self, content: bytes, fault: Fault | None, **headers: str) -> None:
        """Send a file or the range that is asked for, with what is wrong about it."""
        begin, status = 0, 200
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            begin, status = int(match[1]), 206
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        body = content[begin:]
        if fault and fault.corrupt:
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send(status, body, fault, **headers)

    def send(self, status: int, body: bytes, fault: Fault | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = fault.drop_after if fault else None
        for start in range(0, len(body[:cut]), 2**16):
            piece = body[:cut][start : start + 2**16]
            self.wfile.write(piece)
            self.server.bytes_sent[self.path] += len(piece)
            time.sleep(fault.delay if fault else 0)
        if cut is not None:
            self.close_connection = True


def sizes(content: bytes) -> dict[str, int]:
    return {"size": len(content), "pointerSize": 130}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a hub in a thread while the block lasts."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
