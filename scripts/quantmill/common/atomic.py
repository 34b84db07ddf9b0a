"""Write files and folders atomically: write next to the final name, fsync, rename."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from quantmill.common.plain_file import open_plain
from quantmill.common.program import UserError

FICLONE = 0x40049409  # of ioctl(2): linux/fs.h
COPIED = 2**20  # bytes at a time
MANIFEST = "quantmill.json"
SNAKEMAKE = ".snakemake_timestamp"  # Snakemake writes it into a folder that is an output


def fsync_path(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def write_atomically(final: Path, *, source: Path | None = None, sync: bool = True) -> Iterator[Path]:
    """Yield a path next to `final` for a file or a folder; rename it to `final` when the block succeeds.

    If the block raises, its files are removed and `final` stays as it was. The next call removes the temporary files
    of a killed run.

    Args:
        source: a folder that the block reads; `final` must not contain it.
        sync: flush the files to the disk first, so that not even a power failure leaves half of them.

    Raises:
        UserError: if `final` exists and is not an artifact of Quantmill, or if another program is writing it.
    """
    final = final.parent.resolve() / final.name
    final.parent.mkdir(parents=True, exist_ok=True)
    partial, old, gone = (final.with_name(f".{final.name}.{name}") for name in ("partial", "old", "gone"))
    with _lock(final):
        names = {path.name for path in final.iterdir()} - {SNAKEMAKE} if final.is_dir() else set()
        if names and MANIFEST not in names:
            raise UserError(
                f"{final}: holds files that are not an artifact of Quantmill; name a folder that does not exist"
            )
        if source is not None and source.resolve() != final and source.resolve().is_relative_to(final):
            raise UserError(f"{final}: contains the input {source}; name another folder to write")
        _remove(partial)
        _remove(gone)
        if old.exists() and not final.exists():  # a run was killed between its two renames
            old.rename(final)
        try:
            yield partial
            if sync:
                for path in sorted(partial.rglob("*")) if partial.is_dir() else []:
                    fsync_path(path)
                fsync_path(partial)
            _replace(partial, final, old)
            if old.exists():
                old.rename(gone)  # a folder named .old is always whole
            _remove(gone)
            if sync:
                fsync_path(final.parent)
        except BaseException:
            _remove(partial)
            raise


def _replace(partial: Path, final: Path, old: Path) -> None:
    """Rename `partial` to `final`; an existing folder is renamed to `old` first."""
    if not partial.is_dir() or not final.exists():
        partial.replace(final)
        return
    if not final.is_dir():
        raise UserError(f"{final}: is a file, not a folder; remove it, or name another folder")
    _remove(old)
    final.rename(old)  # a folder cannot be renamed over one with files, and removing files takes a while
    try:
        partial.replace(final)
    except OSError:
        old.rename(final)
        raise


@contextmanager
def _lock(final: Path) -> Iterator[None]:
    """Hold a lock next to `final`. Raises `UserError` if another program holds it."""
    path = final.with_name(f".{final.name}.lock")
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{final}: another program is writing it; wait for it to end") from None
            try:
                same = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            except FileNotFoundError:
                same = False
            if not same:
                continue  # its last holder has removed it
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def work_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder next to `final`, with TMPDIR in it, and remove it when the block ends.

    It is on the artifact's disk, because /tmp may be small. The next call removes the folder of a killed run.
    """
    folder = final.parent.resolve() / f".{final.name}.work"
    shutil.rmtree(folder, ignore_errors=True)
    temporary, before = folder / "tmp", os.environ.get("TMPDIR")
    temporary.mkdir(parents=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    try:
        yield folder
    finally:
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


def write_json(final: Path, content: Any) -> None:
    """Write `content` as JSON. Raises ValueError for NaN and infinity, which JSON does not have."""
    with write_atomically(final) as partial:
        partial.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def clone_or_copy(source: Path, target: Path) -> str:
    """Copy a user's file, as a reflink if the file system can; return the SHA-256 of the copy.

    A later write to one file does not change the other, unlike with a hard link. A symbolic link would not do, because
    readers of artifacts refuse links that lead out of the folder. Raises `UserError` if the source is not a plain file
    or was written to during the copy.
    """
    digest, copied = hashlib.sha256(), 0
    buffer = memoryview(bytearray(COPIED))
    with open_plain(source) as read, target.open("xb+", buffering=0) as written:
        before = os.fstat(read.fileno())
        cloned = _clone(read, written)
        if not cloned:
            _check_room(written, before.st_size)
        while copied <= before.st_size and (count := (written if cloned else read).readinto(buffer)):
            copied += count
            digest.update(buffer[:count])
            left = buffer[: 0 if cloned else count]
            while left:
                left = left[written.write(left) :]
        after = os.fstat(read.fileno())
        same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        if not same or copied != before.st_size:
            raise UserError(f"{source}: was written to while it was copied; run again when that is done")
    return digest.hexdigest()


def share(source: Path, target: Path) -> None:
    """Put a file of one artifact into another: as a reflink, else as a hard link, else as a copy.

    A hard link is safe because Quantmill never writes to a finished artifact.
    """
    source = source.resolve(strict=True)
    with open_plain(source) as read, target.open("xb") as written:
        if _clone(read, written):
            return
    target.unlink()
    try:
        os.link(source, target)
    except OSError:
        clone_or_copy(source, target)


def can_clone(folder: Path) -> bool:
    """Return whether the folder's file system has reflinks, by making one."""
    with tempfile.TemporaryFile(dir=folder) as one, tempfile.TemporaryFile(dir=folder) as other:
        one.write(b"1")
        one.flush()
        return _clone(one, other)


def _clone(source: IO[bytes], target: IO[bytes]) -> bool:
    try:
        fcntl.ioctl(target.fileno(), FICLONE, source.fileno())
    except OSError:  # another file system, or one without reflinks
        return False
    return True


def _check_room(target: IO[bytes], size: int) -> None:
    """Raise OSError if the disk has no room for `size` bytes; a sparse file may be larger than any disk."""
    found = os.fstatvfs(target.fileno())
    if found.f_blocks and found.f_bavail * found.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target.name)
