"""Nothing appears under its final name before it is whole: write beside, fsync, rename."""

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
SNAKEMAKE = ".snakemake_timestamp"  # what Snakemake leaves in a folder that is an output


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
    """Yield a path beside `final` to write a file or a folder to; rename it to `final` when the block succeeds.

    When the block raises, what it wrote is removed and `final` is left as it was. What a killed run left behind under
    temporary names is removed at the next start. Raises `UserError` where `final` is or holds something else than an
    artifact of ours, which must not be replaced, and where another program is writing it.

    Args:
        source: a folder that is read meanwhile; `final` must not hold it.
        sync: flush what was written to the disk first, so that not even a power failure leaves half of it.
    """
    final = final.parent.resolve() / final.name
    final.parent.mkdir(parents=True, exist_ok=True)
    partial, old, gone = (final.with_name(f".{final.name}.{name}") for name in ("partial", "old", "gone"))
    with _lock(final):
        names = {path.name for path in final.iterdir()} - {SNAKEMAKE} if final.is_dir() else set()
        if names and MANIFEST not in names:
            raise UserError(
                f"{final}: holds files that are no artifact of Quantmill; name a folder that does not exist"
            )
        if source is not None and source.resolve() != final and source.resolve().is_relative_to(final):
            raise UserError(f"{final}: holds {source}, which is to be read; name another folder to write")
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
                old.rename(gone)  # what is called old is always whole
            _remove(gone)
            if sync:
                fsync_path(final.parent)
        except BaseException:
            _remove(partial)
            raise


def _replace(partial: Path, final: Path, old: Path) -> None:
    """Rename `partial` to `final`; a folder that is there already is put aside as `old`."""
    if not partial.is_dir() or not final.exists():
        partial.replace(final)
        return
    if not final.is_dir():
        raise UserError(f"{final}: is a file where a folder is to be; remove it, or name another folder")
    _remove(old)
    final.rename(old)  # a folder cannot be renamed over one that holds files, and removing one takes a while
    try:
        partial.replace(final)
    except OSError:
        old.rename(final)
        raise


@contextmanager
def _lock(final: Path) -> Iterator[None]:
    """Hold a lock beside `final`. Raises `UserError` where another program holds it."""
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
                continue  # whoever held it has removed it meanwhile
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def work_folder(final: Path) -> Iterator[Path]:
    """An empty folder beside `final` for as long as a tool works, with the tool's temporary files too: on the disk that
    holds the artifact, because /tmp may be small. What a killed run left is removed at the next start."""
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
    """Write `content` as JSON. NaN and infinity are refused: no reader of JSON need know them."""
    with write_atomically(final) as partial:
        partial.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def clone_or_copy(source: Path, target: Path) -> str:
    """Copy somebody's file; the SHA-256 of what was copied. A reflink where the file system can, which costs no disk:
    in neither case does a later writer to one change the other, as with a hard link.

    Never a symbolic link: artifacts are read as if a stranger had made them, and links that lead out are refused.
    Raises `UserError` where it is no plain file, or was written to meanwhile.
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
    """Give a file of an artifact of ours a second name in another: a reflink where the file system can, else a hard
    link, since only Quantmill writes there and never to what is finished; a copy where there can be neither."""
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
    """Whether a folder's file system has reflinks, which is tried."""
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
    """Raises OSError where a file cannot have that many bytes: a sparse one may be larger than any disk."""
    found = os.fstatvfs(target.fileno())
    if found.f_blocks and found.f_bavail * found.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target.name)
