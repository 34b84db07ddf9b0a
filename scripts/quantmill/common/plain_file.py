"""Look at what lies at a path before it is read: a pipe blocks, a device has no end, and a folder is no file."""

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
    """Whether a plain file lies at a path, links followed; no, where nothing lies there.

    Raises `UserError` where something else lies there, or a link that leads nowhere, or what may not be looked at.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise UserError(f"{path}: is a link that leads nowhere; put the file itself there") from None
        return False
    except OSError as error:  # links in a ring, a folder that may not be read, a name that is too long
        raise UserError(f"{path}: {error.strerror}; put a file there that can be read") from None
    except ValueError:  # a NUL in the name
        return False
    _check(path, found)
    return True


def open_plain(path: Path) -> BufferedReader:
    """Open a plain file to be read. Without the kernel's wait for a pipe's writer, and what was opened is looked at.

    Raises `UserError` where `is_there` does, and FileNotFoundError where nothing lies there.
    """
    if is_there(path):  # to open a device may do something
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
    """A plain file's bytes; of one of more than `limit` the first `limit` + 1, so that the caller sees it.

    Raises `UserError` where `open_plain` does, and where there are more or fewer bytes than the file is said to have,
    as in /proc or while somebody writes.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, limit) + 1) or b""  # None of some of /proc, where nothing is ready
    if len(content) != min(size, limit + 1):
        raise UserError(f"{path}: its size is not that of its content; is it still written? Name a file of a disk")
    return content


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise UserError(f"{path}: is {kind}, not a file; put a file there")
