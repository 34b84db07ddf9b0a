"""One workflow at a time in a folder of artifacts, from any checkout.

Snakemake locks only its own folder `.snakemake`, of which every checkout has one. It also removes a job's outputs
before the job runs, so two workflows would remove each other's inputs. So the folder of artifacts is locked instead.
Snakemake's records of what made each file are in it too, for all checkouts: without them, a checkout would take the
artifacts of another config for its own.

The lock is `flock`. It excludes workflows of other hosts only if the file system passes `flock` on to its server.
"""

import os
import pwd
import shutil
import socket
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from quantmill.common.program import UserError, printable

LOCK = ".lock"  # it holds one line that names its last holder
RECORDS = ("metadata", "incomplete")  # folders in Snakemake's own
WAIT = 0.5  # seconds, because `read` holds the lock for a moment
FREE = 2**20  # bytes for records and logs; with less, Snakemake itself fails with many lines

_held: list[FileLock] = []  # until the process ends


def read(folder: Path) -> str | None:
    """Return what the lock's file says while jobs are planned, for `hold`; None if a workflow holds the lock."""
    path = folder / LOCK
    if not path.exists():
        return ""
    try:
        with _lock(path):
            return path.read_text(errors="replace")
    except OSError:
        return None


def hold(folder: Path, planned: str | None) -> None:
    """Hold the lock until this process ends; the kernel frees it however the process ends.

    Args:
        planned: what `read` returned before jobs were planned.

    Raises:
        UserError: if another workflow holds the lock or has worked here since jobs were planned, and if the folder
            cannot be written or locked or is full.
    """
    folder = folder.resolve()
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written by {_user()} ({error.strerror}); make it writable, or link artifacts to"
            " another folder"
        ) from None
    lock = _lock(path)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{folder}: {_name(path)} is working there; wait for it to end, or link artifacts to another folder"
        ) from None
    except OSError as error:
        raise UserError(
            f"{path}: cannot be locked ({error.strerror}); link artifacts to a file system that has locks"
        ) from None
    _held.append(lock)
    if shutil.disk_usage(folder).free < FREE:
        raise UserError(f"{folder}: no space is left there; free some and run again")
    if path.read_text(errors="replace") != planned:
        raise UserError(f"{folder}: {_name(path)} worked there while this one was planned; start again")
    where = f"process {os.getpid()} on {socket.gethostname()}, in {Path.cwd()}, since {datetime.now():%F %T}"
    path.write_text(f"a workflow of {_user()} ({where})\n")


def _lock(path: Path) -> FileLock:
    return FileLock(path, timeout=WAIT, fallback_to_soft=False)


def _name(path: Path) -> str:
    return printable(path.read_text(errors="replace").strip()) or "another workflow"


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's
        return str(os.getuid())


def share_records(folder: Path, own: Path, *, begin: bool = False) -> None:
    """Let Snakemake read and write its records in the folder of artifacts.

    Args:
        own: Snakemake's folder, `.snakemake`.
        begin: move the records of this checkout there if the folder has none; the caller holds the lock.
    """
    for name in RECORDS:
        link, shared = own / name, folder / ".snakemake" / name
        if link.is_symlink() and not shared.exists():  # the artifacts were removed
            link.unlink()
        if begin and link.is_dir() and not shared.exists():
            shared.parent.mkdir(exist_ok=True)
            shutil.move(link, shared)
        if shared.exists() and not link.is_symlink():
            if link.exists():
                shutil.rmtree(link)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(os.path.relpath(shared, own))
