"""The Hugging Face Hub: the commit of a revision, the files of a repository, and their download with checked hashes.

It uses huggingface_hub and its cache, so a model that is already there is not fetched again. The library's variables
apply (HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). No token passes through our code, and no error
repeats an address, which may carry a signature.
"""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
if not sys.stderr.isatty():  # progress bars do not belong in logs
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import httpx

from quantmill.common import manifest
from quantmill.common.program import UserError

Result = TypeVar("Result")
ATTEMPTS = 4  # for failures that the client does not retry: reset connections, failing servers
WORKERS = 4  # files at the same time


@dataclass(frozen=True)
class File:
    """A file of a repository: its bytes, the SHA-1 of its git blob, and its SHA-256 if the hub stores it as a large
    file. Offline the cache knows one of the two hashes."""

    name: str
    size: int
    blob: str | None
    sha256: str | None


@dataclass(frozen=True)
class Repository:
    """A repository at one commit. `kind` is `model` or `dataset`."""

    name: str
    kind: str
    commit: str
    files: dict[str, File]


def resolve(name: str, revision: str, kind: str = "model") -> Repository:
    """Ask the hub for the commit of a branch, tag or commit and for its files; offline, ask the cache. Raises
    `UserError` if there is no such repository or revision, or the hub cannot or must not be asked."""
    if constants.HF_HUB_OFFLINE:
        return _resolve_offline(name, revision, kind)
    ask = huggingface_hub.HfApi(library_name="quantmill").repo_info
    with _one_line(name, revision):
        info = _retry(lambda: ask(name, revision=revision, repo_type=kind, files_metadata=True))
    if info.sha != revision:  # as the cache does (its refs/), so that the revision is found offline
        ref = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "refs", revision)
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(info.sha, encoding="utf-8")
    return of_info(name, kind, info)


def of_info(name: str, kind: str, info: Any) -> Repository:
    """Return a repository from the client's `repo_info`, asked with `files_metadata`."""
    files = [
        File(entry.rfilename, entry.size or 0, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
        for entry in info.siblings or []
    ]
    return Repository(name, kind, info.sha, {file.name: file for file in files})


def fetch(repository: Repository, names: Iterable[str]) -> dict[str, Path]:
    """Download files to the hub's cache and check their hashes: name -> path there. Raises `UserError` if the disk has
    no room for them, before the first byte; if the hub fails or refuses; and if a file does not have the hub's hash,
    which removes it."""
    files = [repository.files[name] for name in names]
    _check_disk(repository, files)

    def one(file: File) -> tuple[str, Path]:
        words = {"repo_type": repository.kind, "revision": repository.commit, "library_name": "quantmill"}
        with _one_line(repository.name, repository.commit):
            path = _retry(lambda: Path(huggingface_hub.hf_hub_download(repository.name, file.name, **words)))
        _check_hash(repository, file, path)
        return file.name, path

    with ThreadPoolExecutor(WORKERS) as workers:
        return dict(workers.map(one, files))


def _check_disk(repository: Repository, files: Iterable[File]) -> None:
    known = partial(
        huggingface_hub.try_to_load_from_cache, repository.name, revision=repository.commit, repo_type=repository.kind
    )
    missing = sum(file.size for file in files if not isinstance(known(file.name), str))
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise UserError(
            f"{repository.name}: {missing / 1e9:.1f} GB are to be downloaded and {existing} has {free / 1e9:.1f} GB "
            "free; free some, or set HF_HOME to a folder on a larger disk"
        )


def has_hash(file: File, content: Path | bytes) -> bool:
    """Return whether bytes, or those of a local file, are those that the hub has."""
    if file.sha256:
        found = hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else manifest.sha256(content)
        return found == file.sha256
    content = content if isinstance(content, bytes) else content.read_bytes()
    header = f"blob {len(content)}\0".encode()
    return file.blob in (None, hashlib.sha1(header + content).hexdigest())  # git's name for these bytes


def _check_hash(repository: Repository, file: File, path: Path) -> None:
    if not has_hash(file, path):
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise UserError(
            f"{repository.name}: {file.name} came with other bytes than the hub's hash says; "
            "it was removed from the cache, so run again"
        )


def _resolve_offline(name: str, revision: str, kind: str) -> Repository:
    """Return a repository as far as the cache holds it."""
    try:
        words = {"repo_type": kind, "revision": revision, "local_files_only": True}
        folder = Path(huggingface_hub.snapshot_download(name, **words, allow_patterns=[]))
    except errors.LocalEntryNotFoundError:
        raise UserError(
            f"{name}: revision {revision} is not in the cache ({constants.HF_HUB_CACHE}) and HF_HUB_OFFLINE is set; "
            "unset it, or download the model where there is a network"
        ) from None
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        file, blob = path.relative_to(folder).as_posix(), path.resolve().name  # a blob's name in the cache is its hash
        known = {40: "blob", 64: "sha256"}.get(len(blob), "")
        files[file] = File(file, path.stat().st_size, *(blob if known == kind else None for kind in ("blob", "sha256")))
    return Repository(name, kind, folder.name, files)


def _retry(ask: Callable[[], Result]) -> Result:
    """Return the result of `ask`, called again after a failure of the server or the connection."""
    for attempt in range(ATTEMPTS):
        try:
            return ask()
        except errors.HfHubHTTPError as error:
            if error.response.status_code < 500 or attempt == ATTEMPTS - 1:
                raise
        except httpx.TransportError:
            if attempt == ATTEMPTS - 1:
                raise
        time.sleep(2**attempt)
    raise AssertionError("unreachable")


@contextmanager
def _one_line(name: str, revision: str) -> Iterator[None]:
    """Turn the client's exceptions into one line that says what to do."""
    try:
        yield
    except errors.GatedRepoError:
        reason = (
            f"is gated; accept its terms at {constants.ENDPOINT}/{name} and set HF_TOKEN to a token of that account"
        )
    except errors.RepositoryNotFoundError:
        reason = (
            f"{constants.ENDPOINT} has no such repository, or it is private and your token may not read it; "
            "check the name, and set HF_TOKEN (or `hf auth login`) if it is private"
        )
    except errors.RevisionNotFoundError:
        reason = f"has no revision {revision} (any more); name one that its page lists"
    except errors.RemoteEntryNotFoundError:
        reason = f"lost a file while it was downloaded from revision {revision}; run again"
    except errors.HFValidationError:
        reason = "is not a repository's name; write ORGANISATION/NAME"
    except errors.HfHubHTTPError as error:
        reason = _status(error.response.status_code)
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        cause = error.__cause__
        status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else None
        reason = _status(status) if status else _unreachable(cause or error)
    except httpx.TransportError as error:
        reason = _unreachable(error)
    else:
        return
    raise UserError(f"{name}: {reason}") from None


def _unreachable(error: BaseException) -> str:
    return (
        f"cannot reach {constants.ENDPOINT} ({type(error).__name__}); check the network, the proxy and HF_ENDPOINT. "
        "With the model in the cache, HF_HUB_OFFLINE=1 needs no network"
    )


def _status(status: int) -> str:
    if status == 401:
        return "the hub does not accept your token (401); make a new one and set HF_TOKEN to it"
    if status == 403:
        return "your token may not read it (403); give the token read access to this repository"
    if status == 429:
        return "the hub asks to slow down (429); wait some minutes, or set HF_TOKEN, which raises the limit"
    return f"{constants.ENDPOINT} answers {status}; try again later"
