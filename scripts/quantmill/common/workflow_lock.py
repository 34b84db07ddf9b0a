"""One workflow at a time in a folder of artifacts, whichever checkout or host it was started from.

Snakemake locks only its own folder `.snakemake`, of which every checkout has one; and it removes what a job is to write
before the job runs, so that two workflows would take from each other what they read. Here the folder of artifacts is
locked itself. Snakemake's records of what made each file lie in it too, where the next checkout finds them: without
them it would take what another config made for its own.
"""

import atexit
import fcntl
import json
import os
import pwd
import shutil
import socket
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from quantmill.common.program import UserError, printable

LOCK = ".lock"
RECORDS = ("metadata", "incomplete")  # folders in Snakemake's own
KEYS = {"user", "host", "process", "checkout", "since", "ended"}  # of what the lock's file says
WAIT = 1.0  # seconds, for whoever only looks
FREE = 2**20  # bytes for records and logs, without which Snakemake itself fails, in many lines


def read(folder: Path) -> bytes | None:
    """What the lock says while jobs are being planned, for `hold`; None where a workflow holds it."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError:
        return None


def hold(folder: Path, planned: bytes | None) -> None:
    """Hold the lock until this process ends, which frees it however it ends.

    Where flock means nothing to another host, what the lock's file says keeps that host away.

    Args:
        planned: what `read` returned before jobs were planned.

    Raises:
        UserError: where another workflow holds the lock, where one of another host never said that it ended, where one
            has worked here since jobs were planned, and where the folder cannot be written or locked.
    """
    folder = folder.resolve()
    path = folder / LOCK
    file = _open(path)
    if not _try_lock(file, path):
        who = _name(_holder(file.read()))
        raise UserError(f"{folder}: {who} is working there; wait for it to end, or link artifacts to another folder")
    said = file.read()
    last = _holder(said)
    if not last.get("ended", True) and last.get("host") != socket.gethostname():
        raise UserError(
            f"{folder}: {_name(last)} never said that it ended; wait for it, or, if it is gone, remove {path}"
        )
    if shutil.disk_usage(folder).free < FREE:
        raise UserError(f"{folder}: no space is left there; free some and run again")
    if said != planned:
        raise UserError(f"{folder}: {_name(last)} worked there while this one was planned; start again")
    holder = {"user": _user(), "host": socket.gethostname(), "process": os.getpid(), "checkout": str(Path.cwd())}
    holder |= {"since": datetime.now().astimezone().isoformat(timespec="seconds")}
    try:
        _write(file, holder | {"ended": False})
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); make room there and run again") from None
    atexit.register(_end, file, holder | {"ended": True})  # which keeps the file open, and so locked, until then


def _open(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "rb+", buffering=0)
    except OSError as error:
        raise UserError(
            f"{path.parent}: cannot be written by {_user()} ({error.strerror}); make it writable, or link artifacts to"
            " another folder"
        ) from None


def _try_lock(file: IO[bytes], path: Path) -> bool:
    """Whether the lock could be had; `read` has it for a moment too."""
    end = time.monotonic() + WAIT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(WAIT / 10)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be locked ({error.strerror}); link artifacts to a file system that has locks"
            ) from None
        else:
            return True


def _holder(said: bytes) -> dict[str, Any]:
    """What a lock's file says; nothing where its writer was killed before it had."""
    try:
        holder = json.loads(said)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) and holder.keys() == KEYS else {}


def _name(holder: dict[str, Any]) -> str:
    if not holder:
        return "another workflow"
    where = f"process {holder['process']} on {holder['host']}, in {holder['checkout']}, since {holder['since']}"
    return printable(f"a workflow of {holder['user']} ({where})")


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's
        return str(os.getuid())


def _write(file: IO[bytes], holder: dict[str, Any]) -> None:
    file.seek(0)
    file.truncate()
    file.write(json.dumps(holder).encode() + b"\n")
    os.fsync(file.fileno())


def _end(file: IO[bytes], holder: dict[str, Any]) -> None:
    with suppress(OSError):  # a disk that went away is what the workflow failed of, and this host will find it unlocked
        _write(file, holder)


def share_records(folder: Path, own: Path, *, begin: bool = False) -> None:
    """Let Snakemake read and write its records in the folder of artifacts.

    Args:
        own: Snakemake's folder, `.snakemake`.
        begin: where the folder has none yet, those of this checkout become its records; to be called under the lock.
    """
    for name in RECORDS:
        link, shared = own / name, folder / ".snakemake" / name
        if link.is_symlink() and not shared.exists():  # somebody has removed the artifacts
            link.unlink()
        if begin and link.is_dir() and not shared.exists():
            shared.parent.mkdir(exist_ok=True)
            shutil.move(link, shared)
        if shared.exists() and not link.is_symlink():
            if link.exists():
                shutil.rmtree(link)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(os.path.relpath(shared, own))
