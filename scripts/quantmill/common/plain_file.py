"""Open plain files only: a pipe blocks, a device has no end, and a folder is not a file."""

import os
import stat
from io import BufferedReader
from pathlib import Path

from quantmill.common.program import UserError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_there(path: Path) -> bool:
    """Return whether `path` is a plain file, following links; False if it does not exist.

    Raises `UserError` for anything else: another kind of file, a dangling link, or a path that cannot be inspected.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise UserError(f"{path}: is a dangling link; put the file itself there") from None
        return False
    except OSError as error:  # links in a ring, a folder that may not be read, a name that is too long
        raise UserError(f"{path}: {error.strerror}; put a file there that can be read") from None
    except ValueError:  # a NUL in the name
        return False
    _check(path, found)
    return True


def open_plain(path: Path) -> BufferedReader:
    """Open a plain file to read, without waiting for a pipe's writer, and check the open file again.

    Raises `UserError` as `is_there` does, and FileNotFoundError if the file does not exist.
    """
    if is_there(path):  # opening a device may have an effect
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError as error:
            raise UserError(f"{path}: {error.strerror}; make it readable") from None
    else:
        raise FileNotFoundError(2, os.strerror(2), str(path))
    try:
        _check(path, os.fstat(descriptor))  # what is there now
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read(path: Path, limit: int) -> bytes:
    """Read a plain file's bytes, at most `limit` + 1, so that the caller sees if it is too large.

    Raises `UserError` as `open_plain` does, and if the number of bytes is not the file's size, as in /proc or during a
    write.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, limit) + 1) or b""  # None for some files of /proc
    if len(content) != min(size, limit + 1):
        raise UserError(f"{path}: its size is not that of its content; is it being written? Name a file on a disk")
    return content


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise UserError(f"{path}: is {kind}, not a file; put a file there")
