"""The hub's side of an upload over LFS, as the real huggingface_hub speaks it.

A repository is made; files are declared (preupload); large ones are stored under their SHA-256, in parts where they are
larger than one; a commit names all. What it cannot show: Xet, and the real hub's own limits.
"""

import base64
import hashlib
import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hub_server import Fault, Hub, Repository

PIECE = 2**16


@dataclass
class Storage:
    """The uploaded files.

    writers: tokens that may write. part: bytes of a part of a large file. received: bytes of each object that arrived,
    whole or not. commits: names of the files of each. bodies: all that was sent.
    """

    writers: set[str] = field(default_factory=set)
    part: int = 10**9
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    commits: list[list[str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


class Broken(Exception):
    """The connection ends here."""


class Uploads:
    """The handler's answers to POST and PUT."""

    server: "Hub"

    def do_POST(self) -> None:
        self.receive()

    def do_PUT(self) -> None:
        self.receive()

    def receive(self) -> None:
        path, fault = self.note()
        try:
            body = self.body(path, fault)
        except Broken:
            self.close_connection = True
            self.connection.close()
            return
        if fault and fault.status:
            self.send(fault.status, fault.body, **fault.headers)
        elif self.command == "PUT" and (match := re.fullmatch(r"/lfs/([0-9a-f]{64})(?:/([0-9]+))?", path)):
            self.store(match[1], int(match[2] or 0), body)
        elif match := re.fullmatch(r"/lfs/([0-9a-f]{64})/complete", path):
            parts = sorted(number for oid, number in self.server.storage.parts if oid == match[1])
            self.keep(match[1], b"".join(self.server.storage.parts[match[1], number] for number in parts))
        elif path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        else:
            self.change(path, body, fault)

    def body(self, path: str, fault: "Fault | None") -> bytes:
        """Read the request's body, as slowly or as far as the fault says."""
        left = int(self.headers.get("Content-Length", 0))
        if fault and fault.drop_after is not None:
            left = min(left, fault.drop_after)
        oid = next(iter(re.findall(r"^/lfs/([0-9a-f]{64})", path)), "")
        pieces = []
        while left:
            piece = self.rfile.read(min(left, PIECE))
            if not piece:
                raise Broken
            pieces.append(piece)
            left -= len(piece)
            if self.command == "PUT":
                self.server.storage.received[oid] = self.server.storage.received.get(oid, 0) + len(piece)
            time.sleep(fault.delay if fault else 0)
        if fault and fault.drop_after is not None:
            raise Broken
        self.server.storage.bodies.append(b"".join(pieces))
        return b"".join(pieces)

    def reply(self, content: Any) -> None:
        self.send(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})

    def store(self, oid: str, part: int, body: bytes) -> None:
        if part:
            self.server.storage.parts[oid, part] = body
            self.send(200, b"", ETag=f'"{hashlib.md5(body).hexdigest()}"')
        else:
            self.keep(oid, body)

    def keep(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self.send(400, b"")
            return
        self.server.storage.objects[oid] = body
        self.reply({})

    def change(self, path: str, body: bytes, fault: "Fault | None") -> None:
        """Answer a request that needs the right to write."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        named = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        batch = re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path)
        if given.startswith("bad") or not given:
            self.send(401, b"", **{"X-Error-Message": "Invalid credentials in Authorization header"})
        elif given not in self.server.storage.writers:
            self.send(403, b"", **{"X-Error-Message": "Your token lacks the scope repo.write"})
        elif path == "/api/repos/create":
            self.create(json.loads(body), given)
        elif batch and self.repository("models", batch[1], None):
            self.reply(
                {"transfer": "multipart", "objects": [self.action(each) for each in json.loads(body)["objects"]]}
            )
        elif named and (found := self.repository("models", named[1], None)):
            if named[2] == "preupload":
                self.reply({"files": [self.mode(found, each) for each in json.loads(body)["files"]]})
            else:
                self.commit(named[1], found, [json.loads(line) for line in body.splitlines()], fault)
        elif not named and not batch:
            self.send(404, b"", **{"X-Error-Code": "EntryNotFound"})

    def create(self, wanted: dict[str, Any], token: str) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        if f"models/{name}" in self.server.repositories:
            self.send(409, b"", **{"X-Error-Message": "You already created this model repo"})
            return
        kind = self.server.kind
        private = wanted.get("visibility") == "private"
        self.server.repositories[f"models/{name}"] = kind(
            {".gitattributes": b"*.bin filter=lfs\n"}, token=token if private else None
        )
        self.reply({"url": f"{self.server.endpoint}/{name}", "name": name, "id": "1"})

    def mode(self, found: "Repository", wanted: dict[str, Any]) -> dict[str, Any]:
        """Answer for each file whether it is stored in LFS, and the repository's own version."""
        large, content = self.server.is_large(wanted["path"]), found.files.get(wanted["path"])
        oid = content and (hashlib.sha256(content).hexdigest() if large else git_blob(content))
        return {"path": wanted["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Answer where to send an object; nowhere if it exists."""
        oid, size, storage = wanted["oid"], wanted["size"], self.server.storage
        if oid in storage.objects:
            return wanted
        place = f"{self.server.endpoint}/lfs/{oid}"
        if size <= storage.part:
            return wanted | {"actions": {"upload": {"href": place}}}
        count = -(-size // storage.part)
        header = {"chunk_size": str(storage.part)} | {str(n): f"{place}/{n}" for n in range(1, count + 1)}
        return wanted | {"actions": {"upload": {"href": f"{place}/complete", "header": header}}}

    def commit(self, name: str, found: "Repository", lines: list[dict[str, Any]], fault: "Fault | None") -> None:
        parent = next((each["value"].get("parentCommit") for each in lines if each["key"] == "header"), None)
        if parent not in (None, found.commit):
            self.send(412, b"", **{"X-Error-Message": "A commit has happened since. Please refresh and try again."})
            return
        files = dict(found.files)
        for each in lines:
            words = each["value"]
            if each["key"] == "file":
                files[words["path"]] = base64.b64decode(words["content"])
            elif each["key"] == "lfsFile":
                files[words["path"]] = self.server.storage.objects[words["oid"]]
                if fault and fault.corrupt:
                    files[words["path"]] = files[words["path"]][:-1] + b"?"
            elif each["key"] == "deletedFile":
                del files[words["path"]]
        found.files = files
        self.server.storage.commits.append([each["value"]["path"] for each in lines if each["key"] != "header"])
        if fault and fault.mute:
            self.close_connection = True
            self.connection.close()
            return
        self.reply({"commitUrl": f"{self.server.endpoint}/{name}/commit/{found.commit}", "commitOid": found.commit})


def git_blob(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
