"""Nothing appears under its final name before it is whole: write beside, fsync, rename."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.program import UserError

MANIFEST = "quantmill.json"


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
def publish(final: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a path beside `final` to write a file or a folder to; rename it to `final` when the block succeeds.

    When the block raises, what it wrote is removed and `final` is left as it was. What a killed run left behind under
    temporary names is removed at the next start. Raises `UserError` where `final` is a folder that holds something
    else than an artifact of ours, which must not be replaced.

    Args:
        sync: flush what was written to the disk first, so that not even a power failure leaves half of it.
    """
    final = final.parent.resolve() / final.name
    if final.is_dir() and any(path.name[0] != "." for path in final.iterdir()) and not (final / MANIFEST).exists():
        raise UserError(f"{final}: holds files that are no artifact of Quantmill; name a folder that does not exist")
    final.parent.mkdir(parents=True, exist_ok=True)
    partial, old = final.with_name(f".{final.name}.partial"), final.with_name(f".{final.name}.old")
    _remove(partial)
    _remove(old)
    try:
        yield partial
        if sync:
            for path in sorted(partial.rglob("*")) if partial.is_dir() else []:
                if not path.is_symlink():
                    fsync_path(path)
            fsync_path(partial)
        if partial.is_dir() and final.exists():
            final.rename(old)  # a folder cannot be renamed over one that holds files, and removing one takes a while
        partial.replace(final)
        _remove(old)
        if sync:
            fsync_path(final.parent)
    except BaseException:
        _remove(partial)
        raise


def publish_json(final: Path, content: Any) -> None:
    """Write `content` as JSON. NaN and infinity are refused: no reader of JSON need know them."""
    with publish(final) as partial:
        partial.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def place(source: Path, target: Path) -> None:
    """Give a file a second name without copying it: a hard link, or a symbolic one across filesystems."""
    source = source.resolve(strict=True)
    try:
        os.link(source, target)
    except OSError:
        target.symlink_to(source)
