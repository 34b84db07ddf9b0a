#!/usr/bin/env python3
"""Make the environment that lies packed beside this file. No network is used, and nothing but Python is needed.

    python3.12 unpack.py FOLDER

FOLDER becomes a virtual environment of the Python that runs this. It has that name only when it is whole. Until then
everything is in a hidden folder beside it, which a second run removes if the first one was killed.
"""

from __future__ import annotations  # any Python is to say what is wrong with it

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

HERE = Path(__file__).resolve().parent
SUMS = "SHA256SUMS"
FACTS = "quantmill.json"
CHUNK = 2**20  # bytes
COPY = "copy it beside unpack.py again"
# pip from its wheel, in the new environment; programs are to begin with the environment's later name
PIP = "import runpy, sys; sys.executable, wheel = sys.argv[1:3]; del sys.argv[1:3]; sys.path.insert(0, wheel); "
PIP += "runpy.run_module('pip', run_name='__main__', alter_sys=True)"


class Refused(Exception):
    """One line: what is wrong, where, and what to do."""


class Joined:
    """The parts, read as one file."""

    def __init__(self, paths: list[Path]) -> None:
        self._rest = list(paths)
        self._file: BinaryIO = self._rest.pop(0).open("rb")

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end of the last part."""
        while True:
            data = self._file.read(size)
            if data or not self._rest:
                return data
            self._file.close()
            self._file = self._rest.pop(0).open("rb")


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def read_sums() -> dict[str, str]:
    """SHA-256 by file, and every file is there."""
    if not (HERE / SUMS).is_file():
        raise Refused(f"{HERE / SUMS} is missing; {COPY}, or pack the bundle again if it was broken off")
    sums = {}
    for line in (HERE / SUMS).read_text(encoding="utf-8", errors="replace").splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  ([\w.-]+)", line)
        if not match:
            raise Refused(f"{HERE / SUMS} is broken; {COPY}")
        sums[match[2]] = match[1]
    return sums


def check_files(names: list[str], sums: dict[str, str]) -> None:
    """Raises `Refused` with the names of all that are missing, or else of all that are broken."""
    missing = [name for name in names if not (HERE / name).is_file()]
    if missing:
        raise Refused(f"{HERE}: missing: {', '.join(missing)}; {COPY}")
    broken = [name for name in names if sums.get(name) != sha256(HERE / name)]
    if broken:
        raise Refused(f"{HERE}: broken (not the SHA-256 of {SUMS}): {', '.join(broken)}; {COPY}")


def check_machine(facts: dict[str, Any], target: Path) -> None:
    """Raises `Refused` where this Python, this machine or the folder asked for will not do."""
    wanted, here = facts["python"], platform.python_version()
    if sys.implementation.name != "cpython" or here.rpartition(".")[0] != wanted:
        raise Refused(
            f"{HERE}: is for Python {wanted}, and this is {platform.python_implementation()} {here}; run it as "
            f"python{wanted} unpack.py, or pack again with --python-version {here.rpartition('.')[0]}"
        )
    if platform.machine() != facts["machine"]:
        raise Refused(
            f"{HERE}: is for {facts['machine']}, and this machine is {platform.machine()}; pack again with "
            f"--platform manylinux_2_28_{platform.machine()}"
        )
    library, version = platform.libc_ver()
    numbers = [tuple(int(part) for part in text.split(".")[:2]) for text in (facts["glibc"], version or "0.0")]
    if library != "glibc" or numbers[1] < numbers[0]:
        raise Refused(
            f"{HERE}: wants glibc {facts['glibc']}, and this machine has {library or 'another library'} {version}; "
            f"pack again with --platform manylinux_{version.replace('.', '_')}_{platform.machine()}"
        )
    if os.path.lexists(target):
        raise Refused(f"{target}: exists; name a folder that does not")
    parent = next(path for path in target.parents if path.is_dir())
    free, needed = shutil.disk_usage(parent).free, facts["packed_bytes"] + facts["installed_bytes"]
    if free < needed:
        raise Refused(f"{parent}: {free / 1e9:.1f} GB are free, and {needed / 1e9:.1f} are needed; free some space")


def extract(parts: list[Path], folder: Path) -> None:
    """Write the parts' files under `folder`."""
    with tarfile.open(fileobj=Joined(parts), mode="r|") as tar:
        for member in tar:
            inside = PurePosixPath(member.name)
            if not member.isreg() or inside.is_absolute() or ".." in inside.parts:
                raise Refused(f"{HERE}: {member.name} is no file of a bundle; pack it again")
            path = folder / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                shutil.copyfileobj(tar.extractfile(member), file, CHUNK)
            path.chmod(member.mode)


def install(packages: list[str], work: Path, target: Path, lock: int) -> Path:
    """A virtual environment with `packages` in `work`, to be renamed to `target`. Raises `Refused` with pip's error.

    pip sees no settings, no index and no dependencies. It holds `lock` as well, for where this program is killed.
    """
    env = work / "env"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(env)
    for path in [env / "pyvenv.cfg", *env.glob("bin/[aA]ctivate*")]:
        path.write_bytes(path.read_bytes().replace(os.fsencode(env), os.fsencode(target)))
    listing = work / "packages.txt"
    listing.write_text("\n".join(packages) + "\n", encoding="utf-8")
    (installer,) = (work / "wheels").glob("pip-*.whl")
    command = [env / "bin/python", "-I", "-c", PIP, target / "bin/python", installer, "install", "--no-index"]
    command += ["--no-deps", "--no-cache-dir", "--no-compile", "--no-warn-script-location", "--quiet"]
    command += ["--disable-pip-version-check", "--find-links", work / "wheels", "--requirement", listing]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment.update(PIP_CONFIG_FILE=os.devnull, TMPDIR=str(work))
    result = subprocess.run(
        [str(word) for word in command], env=environment, stderr=subprocess.PIPE, text=True, pass_fds=[lock]
    )
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.startswith("ERROR: ")]
        raise Refused(f"{target}: pip could not install ({lines[-1][7:] if lines else result.stderr.strip()[-500:]})")
    return env


def keep_sources(folder: Path) -> None:
    """Put what is to be compiled here where llamacpp.compile looks for it, if it is not there already."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantmill"
    cache.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if not (cache / path.name / "ready").exists():
            shutil.rmtree(cache / path.name, ignore_errors=True)
            shutil.copytree(path, cache / f".{path.name}.partial", dirs_exist_ok=True)
            (cache / f".{path.name}.partial").rename(cache / path.name)
            print(f"Sources: {cache / path.name}", file=sys.stderr)


def unpack(target: Path) -> str:
    """Make the environment; the line for the study's config. Raises `Refused`, and then nothing is left."""
    sums = read_sums()
    check_files([FACTS], sums)
    facts = json.loads((HERE / FACTS).read_text(encoding="utf-8"))
    check_machine(facts, target)
    print(f"Checking {len(facts['parts'])} parts, {facts['packed_bytes'] / 1e6:.0f} MB", file=sys.stderr)
    check_files(sorted({*facts["parts"], *sums}), sums)
    work = target.with_name(f".{target.name}.unpack")
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another run, or the pip of one that was killed: {work}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            check_machine(facts, target)
            work.mkdir(exist_ok=True)  # the other run has removed it
            for path in work.iterdir():
                if path.name != "lock":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            extract([HERE / name for name in facts["parts"]], work)
            print(f"Installing {len(facts['packages'])} packages", file=sys.stderr)
            env = install(facts["packages"], work, target, lock.fileno())
            if (work / "cache").exists():
                keep_sources(work / "cache")
            env.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return f"interpreters: {{{facts['bundle']}: {target}/bin/python}}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path, help="the environment's folder, which must not exist")
    folder = arguments.parse_args().folder
    target = folder.parent.resolve() / folder.name
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        line = unpack(target)
    except Refused as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename or target}: {error.strerror}; nothing was installed")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; nothing was installed")
    print("In the study's config:", file=sys.stderr)
    print(line)


if __name__ == "__main__":
    main()
