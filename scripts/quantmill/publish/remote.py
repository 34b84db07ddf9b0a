"""Upload to a hub repository: read what it holds, check that this may be replaced, upload, and verify every hash.

huggingface_hub's own client does the transfers. Quantmill never handles the token, and no error repeats a server's
words, which may hold a signed address. An upload is one commit: if it is interrupted, the repository stays as it was,
and large files that arrived whole are not sent again.
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

GIT = ".gitattributes"  # written by the hub
OVERWRITE = "name another, or set publish: {overwrite: true}, which removes what it holds"
FULL = (402, 413, 507)  # status of a full quota; so is a 403 that mentions storage
OF_XET = re.compile(r"error \((\d{3}) ")  # the status in an error of hf_xet, which raises OSError
STALE = "the repository was created or changed meanwhile (CODE), or your token may not see it; run again"
REASONS = {  # by status
    400: "the hub refuses what was sent (CODE); check the repository's name and the licence's",
    401: "the hub does not accept your token (CODE); make a new one that may write, and set HF_TOKEN to it",
    403: "your token may not write there (CODE); give it write access to repositories of this account",
    404: "the hub has no such repository (any more), or your token may not see it; check the name and the token",
    409: STALE,
    412: STALE,
    429: "the hub asks to slow down (CODE); wait some minutes and run again",
}
Files = Mapping[str, Path | bytes]
Hashes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Pushed:
    """Commit after an upload, and the files that were sent and removed."""

    commit: str
    sent: list[str]
    removed: list[str]


def push(name: str, files: Files, hashes: Hashes, private: bool, overwrite: bool) -> Pushed:
    """Make a repository hold these files and no others. Files that it has already are not sent.

    Args:
        hashes: each file's size and SHA-256.

    Raises:
        UserError: the repository holds something other than Quantmill's upload of the same artifacts, the hub refuses,
            or its files have other hashes afterwards.
    """
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{name}: HF_HUB_OFFLINE is set; unset it to publish")
    if huggingface_hub.get_token() is None:
        raise UserError(f"{name}: there is no token; set HF_TOKEN to one that may write there, or run `hf auth login`")
    api = huggingface_hub.HfApi(library_name="quantmill")
    with _one_line(name):
        there = find_repository(api, name, private)
        if there is None:
            api.create_repo(name, private=private)
            there = find_repository(api, name, private)
    if there is None:
        raise UserError(f"{name}: was made, and your token may not read it; give the token read access as well")
    if not overwrite:
        ours = files[MANIFEST]
        check_ours(there, json.loads(ours if isinstance(ours, bytes) else ours.read_bytes()))
    sent = [file for file, content in files.items() if not has(there, file, content, hashes[file])]
    removed = sorted(there.files.keys() - files.keys() - {GIT})
    commit = there.commit
    if sent or removed:
        operations = [CommitOperationAdd(file, files[file]) for file in sent]
        operations += [CommitOperationDelete(file) for file in removed]
        with _one_line(name):
            made = api.create_commit(
                name, operations, commit_message="Publish by Quantmill", parent_commit=there.commit
            )
        commit = made.oid
    verify(api, name, commit, files, hashes)
    return Pushed(commit, sent, removed)


def find_repository(api: huggingface_hub.HfApi, name: str, private: bool) -> hub.Repository | None:
    """Return a repository at its newest commit, or None if the token sees none.

    Raises `UserError` if it is public and the study says private.
    """
    try:
        info = api.repo_info(name, files_metadata=True)
    except errors.RepositoryNotFoundError as error:
        if error.response.status_code == 401:  # the hub does not know the token
            raise
        return None
    if private and not info.private:
        raise UserError(f"{name}: is public, and the study says private; make it private, or say private: false")
    return hub.of_info(name, "model", info)


def has(there: hub.Repository, name: str, content: Path | bytes, known: Mapping[str, Any]) -> bool:
    """Tell whether a repository holds a file with these bytes. `known`: their number and SHA-256."""
    found = there.files.get(name)
    if found is None or found.size != known["bytes"]:
        return False
    return found.sha256 == known["sha256"] if found.sha256 else hub.has_hash(found, content)


def check_ours(there: hub.Repository, ours: Mapping[str, Any]) -> None:
    """Raise `UserError` if a repository holds a file that no upload of the same artifacts put there."""
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
            raise UserError(f"{there.name}: {name!r:.60} was added or changed since the upload; {OVERWRITE}")


def read_manifest(there: hub.Repository) -> dict[str, Any]:
    """Read the quantmill.json of a repository. Raises `UserError` if no upload of Quantmill wrote it."""
    data = hub.fetch(there, [MANIFEST])[MANIFEST].read_bytes()
    try:
        found = bounded_json.loads(data, manifest.MAX_BYTES)
    except ValueError:
        found = None
    artifacts, described = map((found if isinstance(found, dict) else {}).get, ("artifacts", "files"))
    if not isinstance(artifacts, dict) or not isinstance(described, dict):
        raise UserError(f"{there.name}: its {MANIFEST} is not of an upload of Quantmill; {OVERWRITE}")
    if not all(isinstance(each, dict) for each in described.values()):
        raise UserError(f"{there.name}: its {MANIFEST} is damaged; {OVERWRITE}")
    return found


def verify(api: huggingface_hub.HfApi, name: str, commit: str, files: Files, hashes: Hashes) -> None:
    """Compare the hub's hash of every file at a commit. Raises `UserError` if one is not that of the local file."""
    with _one_line(name):
        there = hub.of_info(name, "model", api.repo_info(name, revision=commit, files_metadata=True))
    wrong = [file for file, content in files.items() if not has(there, file, content, hashes[file])]
    wrong += sorted(there.files.keys() - files.keys() - {GIT})
    if wrong:
        raise UserError(
            f"{name}: at commit {commit[:12]} the hub has another {wrong[0]} than was sent; build the artifact "
            "again if its file was changed, and publish with publish: {overwrite: true}"
        )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn any error of the client into one line that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """Say what failed and what to do, by an error of the client or one of its causes."""
    for each in causes(error):
        if isinstance(each, errors.HFValidationError):
            return "is not a repository's name, which is ORGANISATION/NAME"
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
    """Say what a status of the hub means for an upload."""
    if code in FULL or (code == 403 and "storage" in said.lower()):
        return f"the hub has no room for it ({code}); free some of the account's storage, or enlarge it"
    again = f"{constants.ENDPOINT} answers {code}; run again later: what arrived is not sent again"
    return REASONS.get(code, again).replace("CODE", str(code))
