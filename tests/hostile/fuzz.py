#!/usr/bin/env python3
"""Coverage-guided fuzzing of the two parsers with atheris; not part of the test suite.

    python tests/hostile/fuzz.py bin|pickle|safetensors CORPUS [-max_total_time=1800] [other options of libFuzzer]

Whatever the bytes are, a parser either refuses them with one `UserError`, or finds tensors that lie inside the file and
that survive a round trip through the other form. Anything else is a crash, whose input libFuzzer keeps. Fuzzed in
docs/FUZZING.md; needs atheris and envs/tools' packages.
"""

import os
import sys
import tempfile
import zipfile
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
with atheris.instrument_imports(include=["checkpoint", "pickle", "zipfile", "json"]):
    from checkpoint import copying, safetensors_file, torch_pickle, torch_zip, zip_directory  # noqa: F401
    from common import bounded_json  # noqa: F401
    from common.program import UserError

FOLDER = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
LARGE = 1 << 20  # bytes of tensors beyond which they are not read


def read(data: bytes) -> None:
    """Read the bytes as the form that is fuzzed, and convert what is found to the other form and back."""
    source, other, back = (FOLDER / name for name in ("source", "other", "back"))
    if form == "pickle":
        with zipfile.ZipFile(source, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/data/0", bytes(range(64)))
    else:
        source.write_bytes(data)
    one, two = (safetensors_file, torch_zip) if form == "safetensors" else (torch_zip, safetensors_file)
    try:
        tensors = one.read(source)
    except UserError as error:
        if str(source) not in str(error):
            raise AssertionError(f"names no file: {error}") from error
        return
    if sum(tensor.nbytes for tensor in tensors.values()) > LARGE:
        return
    two.write(other, tensors.values())
    one.write(back, two.read(other).values())
    again = one.read(back)
    if set(again) != set(tensors) or not all(copying.equal_bytes(tensors[name], again[name]) for name in tensors):
        raise AssertionError("the round trip changed the tensors")


if __name__ == "__main__":
    form = sys.argv.pop(1)
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()
