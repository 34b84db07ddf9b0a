"""A repository of the hub that is written to: what it holds, whether that may be replaced, the upload, the proof of it.

Through huggingface_hub's own client. No token passes through our hands, and no error repeats what a server says, which
may hold an address with a signature. An upload is one commit: an interrupted one leaves the repository as it was, and
large files that arrived whole are not sent again.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants, errors
from huggingface_hub.utils import httpx

from quantmill.common import bounded_json, manifest
from quantmill.common.atomic import MANIFEST
from quantmill.common.program import UserError
from quantmill.fetch import hub

GIT = ".gitattributes"  # the hub's own
OVERWRITE = "name another, or set publish: {overwrite: true}, which removes what it holds"
FULL = (402, 413, 507)  # of a quota, beside a 403 that speaks of storage
OF_XET = re.compile(r"error \((\d{3}) ")  # a status in what hf_xet raises, whose errors are the system's
STALE = (409, 412)  # of a commit whose parent is not the newest any more
Files = Mapping[str, Path | bytes]
Hashes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Pushed:
    """What a repository holds after an upload, and how many files were sent and removed for it."""

    commit: str
    sent: list[str]
    removed: list[str]


def push(name: str, files: Files, hashes: Hashes, private: bool, overwrite: bool) -> Pushed:
    """Make a repository hold these files and no others; what it has already is not sent.

    Args:
        hashes: each file's size and SHA-256.

    Raises:
        UserError: it holds something else than an upload of ours of the same artifacts, the hub refuses, or what it has
            afterwards has other hashes.
    """
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{name}: HF_HUB_OFFLINE is set; unset it to publish")
    if huggingface_hub.get_token() is None:
        raise UserError(f"{name}: there is no token; set HF_TOKEN to one that may write there, or run `hf auth login`")
    api = huggingface_hub.HfApi(library_name="quantmill")
    with _one_line(name):
        there = find(api, name, private)
        if there is None:
            api.create_repo(name, private=private)
            there = find(api, name, private)
    if there is None:
        raise UserError(f"{name}: was made, and your token may not read it; give the token read access as well")
    if not overwrite:
        check_ours(there, json.loads(files[MANIFEST]))
    sent = [file for file, content in files.items() if not has(there, file, content, hashes[file])]
    removed = sorted(there.files.keys() - files.keys() - {GIT})
    commit = there.commit
    if sent or removed:
        operations = [CommitOperationAdd(file, _source(files[file])) for file in sent]
        operations += [CommitOperationDelete(file) for file in removed]
        with _one_line(name):
            made = api.create_commit(
                name, operations, commit_message="Publish by Quantmill", parent_commit=there.commit
            )
        commit = made.oid
    verify(api, name, commit, files, hashes)
    return Pushed(commit, sent, removed)


def _source(content: Path | bytes) -> str | bytes:
    return content if isinstance(content, bytes) else str(content)


def find(api: huggingface_hub.HfApi, name: str, private: bool) -> hub.Repository | None:
    """A repository at its newest commit; None where there is none, as far as the token tells. Raises `UserError` for a
    public one where a private one is asked for."""
    try:
        info = api.repo_info(name, files_metadata=True)
    except errors.RepositoryNotFoundError as error:
        if error.response.status_code == 401:  # of a token that the hub does not know
            raise
        return None
    if private and not info.private:
        raise UserError(f"{name}: is public, and the study says private; make it private, or say private: false")
    return hub.of_info(name, "model", info)


def has(there: hub.Repository, name: str, content: Path | bytes, known: Mapping[str, Any]) -> bool:
    """Whether a repository holds a file with these bytes. `known`: their number and SHA-256."""
    found = there.files.get(name)
    if found is None or found.size != known["bytes"]:
        return False
    return found.sha256 == known["sha256"] if found.sha256 else hub.has_hash(found, content)


def check_ours(there: hub.Repository, ours: Mapping[str, Any]) -> None:
    """Raises `UserError` where a repository holds anything that an upload of the same artifacts did not put there."""
    if not there.files.keys() - {GIT}:
        return
    if MANIFEST not in there.files:
        raise UserError(f"{there.name}: holds something else, and no {MANIFEST}; {OVERWRITE}")
    theirs = read_manifest(there)
    for key in ("model", "layout"):
        if theirs.get(key) != ours[key]:
            raise UserError(f"{there.name}: holds another {key}, {theirs.get(key)!r:.60}; {OVERWRITE}")
    for name in theirs["artifacts"]:
        if name not in ours["artifacts"]:
            more = "add it to publish.formats, or set publish: {overwrite: true}, which removes it"
            raise UserError(f"{there.name}: holds {name!r:.60}, which this study does not publish; {more}")
    names = sorted(there.files.keys() - {GIT, MANIFEST})
    fetched = hub.fetch(there, [name for name in names if not there.files[name].sha256])
    for name in names:
        found = there.files[name].sha256 or manifest.sha256(fetched[name])
        if theirs["files"].get(name, {}).get("sha256") != found:
            raise UserError(f"{there.name}: somebody put {name!r:.60} there, or changed it; {OVERWRITE}")


def read_manifest(there: hub.Repository) -> dict[str, Any]:
    """quantmill.json of a repository. Raises `UserError` where it is none that an upload wrote."""
    data = hub.fetch(there, [MANIFEST])[MANIFEST].read_bytes()
    try:
        found = bounded_json.loads(data, manifest.MAX_BYTES)
    except ValueError:
        found = None
    parts = [found.get(key) for key in ("artifacts", "files")] if isinstance(found, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{there.name}: its {MANIFEST} is of no upload of Quantmill's; {OVERWRITE}")
    if not all(isinstance(each, dict) for each in parts[1].values()):
        raise UserError(f"{there.name}: its {MANIFEST} is damaged; {OVERWRITE}")
    return found


def verify(api: huggingface_hub.HfApi, name: str, commit: str, files: Files, hashes: Hashes) -> None:
    """Ask the hub for the hash of every file at a commit. Raises `UserError` where one is not that of the file here."""
    with _one_line(name):
        there = hub.of_info(name, "model", api.repo_info(name, revision=commit, files_metadata=True))
    wrong = [file for file, content in files.items() if not has(there, file, content, hashes[file])]
    wrong += sorted(there.files.keys() - files.keys() - {GIT})
    if wrong:
        raise UserError(
            f"{name}: at commit {commit[:12]} the hub has another {wrong[0]} than was sent; build the artifact "
            "again if its file was changed, and publish with publish: {overwrite: true}"
        )


def receipt(name: str, pushed: Pushed, hashes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What is kept here of an upload."""
    return {"repository": name, "commit": pushed.commit, "files": hashes}


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it was raised from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn what the client raises into one line that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """What failed and what to do, of an error of the client's or one that it hides."""
    for each in causes(error):
        if isinstance(each, errors.HFValidationError):
            return "is no repository's name; it is ORGANISATION/NAME"
        if isinstance(each, errors.HfHubHTTPError):
            return status(each.response.status_code, each.response.headers.get("X-Error-Message", ""))
        if isinstance(each, OSError) and (found := OF_XET.search(str(each))):
            return status(int(found[1]), "")
        if isinstance(each, httpx.TransportError | ConnectionError):
            return (
                f"the connection to {constants.ENDPOINT} broke ({type(each).__name__}); check the network and run "
                "again: what arrived is not sent again"
            )
    return f"the client failed ({type(error).__name__}); run again"


def status(code: int, said: str) -> str:
    """What the hub's status means for who uploads."""
    if code in FULL or (code == 403 and "storage" in said.lower()):
        return f"the hub has no room for it ({code}); free some of the account's storage, or enlarge it"
    if code == 401:
        return "the hub does not accept your token (401); make a new one that may write, and set HF_TOKEN to it"
    if code == 403:
        return "your token may not write there (403); give it write access to repositories of this account"
    if code == 404:
        return "the hub has no such repository (any more), or your token may not see it; check the name and the token"
    if code in STALE:
        return f"somebody else made or changed it meanwhile ({code}), or your token may not see it; run again"
    if code == 429:
        return "the hub asks to slow down (429); wait some minutes and run again"
    if code == 400:
        return "the hub refuses what was sent (400); check the repository's name and the licence's"
    return f"{constants.ENDPOINT} answers {code}; run again later: what arrived is not sent again"
