"""Wheels that are written by hand."""

import base64
import hashlib
import zipfile
from pathlib import Path


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes], *, requires: str = "") -> Path:
    """Write a wheel of a package that no registry has in this form."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    files = files | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}")
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, data in (files | {f"{info}/RECORD": "\n".join([*lines, f"{info}/RECORD,,"]).encode()}).items():
            entry = zipfile.ZipInfo(inside)
            entry.external_attr = 0o100755 << 16  # scripts are to be run
            archive.writestr(entry, data)
    return path
