"""Pack an environment for a machine without a network: its wheels by their pins, in parts, and what unpacks them.

    python scripts/quantmill environments.bundle envs/vllm.txt OUT [--python-version 3.12] [--platform
        manylinux_2_31_x86_64]
    python3.12 OUT/unpack.py FOLDER             # on the other machine

The wheels are those that environments.create would install, by the same pins, overrides and settings of pip, and what
torch's wheel asks for, which is not pinned. They are for this machine's Python if no other target is named. A package
without a wheel is then built here; for another target it is refused, unless it holds Python alone (`PURE`). The parts
are one tar file without dates, owners or compression, so that the same wheels give the same bytes. The wheels of a
bundle that was broken off stay in a hidden folder beside OUT, and the next one downloads only the rest.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quantmill.common.atomic import work_folder, write_atomically
from quantmill.common.manifest import NAME, sha256
from quantmill.common.program import UserError, parser, start_child
from quantmill.environments.create import find_uv, pip_config, pip_listing, uv_environment
from quantmill.llamacpp.compile import fetch_sources

UNPACK = Path(__file__).with_name("unpack_bundle.py")
SUMS = "SHA256SUMS"
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SMALLEST_PART = 2**20  # bytes; smaller ones are a slip of the hand, and thousands of files
REQUIREMENT = re.compile(r"^([a-z0-9][\w.-]*)(?:\[[^]]*\])?==([^\s;\\]+)(.*?)(?=^\S|\Z)", re.I | re.M | re.S)
OLD_NAMES = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}  # and the glibc that they mean
UV_KNOWS = (17, 28, *range(31, 41))  # uv's platforms x86_64-manylinux_2_*
PURE = ("connection-pool",)  # of Snakemake's: it has no wheel, and one that is built here serves every Python
BATCH = 10  # packages that pip downloads before it puts them down
LONG_AGO = "315532800"  # 1980, the first year of a zip file

Pins = dict[tuple[str, str], list[str]]  # (name, version) -> SHA-256 of its files


@dataclass(frozen=True)
class Target:
    """The machine that a bundle is for. `glibc` is the newest that its wheels may want; `native`: it is this one."""

    python: str
    machine: str
    glibc: tuple[int, int]
    native: bool

    def __str__(self) -> str:
        return f"Python {self.python} on manylinux_{self.glibc[0]}_{self.glibc[1]}_{self.machine}"


def part_size(text: str) -> int:
    """Bytes from `700M` or `4G`, in powers of 1024."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not match or int(match[1]) * UNITS[match[2]] < SMALLEST_PART:
        raise ArgumentTypeError(f"{text!r} is no size of 1M or more, such as 700M or 4G")
    return int(match[1]) * UNITS[match[2]]


def find_target(python: str | None, wanted: str | None) -> Target:
    """The machine that the options name; this one if they name none. Raises `UserError` for what no wheel is for."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python and not re.fullmatch(r"3\.\d+", python):
        raise UserError(f"--python-version {python}: is no version such as 3.12")
    library, version = platform.libc_ver()
    platform_tag = wanted or f"manylinux_{version.replace('.', '_')}_{platform.machine()}"
    match = re.fullmatch(r"manylinux_(2)_(\d+)_(x86_64|aarch64)", platform_tag)
    if not match or not (wanted or library == "glibc"):
        raise UserError(
            f"--platform {platform_tag}: is no Linux with glibc; name the target's, such as manylinux_2_28_x86_64"
        )
    return Target(python or here, match[3], (int(match[1]), int(match[2])), not wanted and python in (None, here))


def read_pins(path: Path) -> Pins:
    """What a requirements file pins, whatever its markers are."""
    found = REQUIREMENT.findall(path.read_text(encoding="utf-8"))
    return {(canonical(name), version): re.findall(r"--hash=sha256:(\w+)", rest) for name, version, rest in found}


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def call(command: list[str], environment: Mapping[str, str]) -> None:
    """Run uv or pip, whose lines are shown. Raises `UserError` with its error."""
    with start_child(command, env=environment, stdout=sys.stderr, stderr=subprocess.PIPE, text=True) as process:
        _, said = process.communicate()
    sys.stderr.write(said)
    if process.returncode:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        start = max((number for number, line in enumerate(lines) if line.lower().startswith("error:")), default=-1)
        raise UserError(" ".join(lines[start:]).partition(":")[2].strip() or f"{command[0]} failed")


def build_pure(pinned: Pins, folder: Path) -> Pins:
    """Build the wheels of `PURE` that are among the pins, in `folder`; name and version with the SHA-256 of each wheel.

    Raises `UserError` where a wheel is not for every Python.
    """
    found: Pins = {}
    for (name, version), hashes in pinned.items():
        if name in PURE:
            listing = folder / f"{name}.txt"
            listing.write_text(requirement(name, version, hashes), encoding="utf-8")
            command = [sys.executable, "-P", "-m", "pip", "wheel", "--wheel-dir", str(folder), "--no-deps"]
            call([*command, "--require-hashes", "--requirement", str(listing)], pip_environment())
            (wheel,) = folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")
            if not wheel.name.endswith("-py3-none-any.whl"):
                raise UserError(f"{name}=={version}: its wheel, {wheel.name}, is not for every Python; pack there")
            found[name, version] = [sha256(wheel)]
    return found


def requirement(name: str, version: str, hashes: list[str]) -> str:
    """A line of a requirements file."""
    return " ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in hashes)]) + "\n"


def pip_environment() -> dict[str, str]:
    """Return pip's environment, by which the same source gives the same wheel."""
    return {**os.environ, "SOURCE_DATE_EPOCH": LONG_AGO, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def resolve(pins: Path, target: Target, work: Path, environment: Mapping[str, str]) -> Pins:
    """What an installation from `pins` takes on the target: markers are applied there, and what torch wants is added.

    Wheels that are built for it lie in `work`. Raises `UserError` where a package has no wheel for the target, or the
    environment is not for it.
    """
    pinned = read_pins(pins)
    pure = {} if target.native else build_pure(pinned, work)
    command = [*find_uv(pins), "pip", "compile", str(pins), "--generate-hashes", "--quiet", "--no-header"]
    command += ["--no-annotate", "--output-file", str(work / "resolved.txt")]
    override = pins.with_suffix(".override")
    command += ["--override", str(override)] if override.exists() else []
    if target.native:
        command += ["--python", sys.executable]
    else:
        newest = max((minor for minor in UV_KNOWS if minor <= target.glibc[1]), default=UV_KNOWS[0])
        command += ["--python-platform", f"{target.machine}-manylinux_2_{newest}", "--python-version", target.python]
        command += ["--no-build"]
        # an option would replace what pip is told to find besides the index
        links = [environment.get("UV_FIND_LINKS", ""), str(work)]
        environment = {**environment, "UV_FIND_LINKS": ",".join(filter(None, links))}
    call(command, {**environment, "UV_NO_WRAP": "1"})
    resolved = read_pins(work / "resolved.txt")
    asked = pins.with_suffix(".in").read_text(encoding="utf-8") if pins.with_suffix(".in").exists() else ""
    names = {canonical(name) for name in re.findall(r"^[a-z0-9][\w.-]*", asked, re.I | re.M)}
    if missing := names - {name for name, _ in resolved}:
        raise UserError(f"{pins}: is no environment for {target}: {', '.join(sorted(missing))} cannot be had there")
    return {key: pure.get(key) or pinned.get(key) or hashes for key, hashes in resolved.items()}


def find_pip(pins: Path) -> Pins:
    """What unpack.py installs with: pip at the version of bootstrap.txt, because not every Python has one."""
    bootstrap = pins.with_name("bootstrap.txt")
    found = {key: hashes for key, hashes in read_pins(bootstrap).items() if key[0] == "pip"}
    if not found:
        raise UserError(f"{bootstrap}: pins no pip; restore the line pip==…")
    return found


def fetch(requirements: Pins, target: Target, folder: Path, built: Path | None = None) -> list[Path]:
    """The wheels of `requirements` in `folder`, sorted by name, downloaded by pip, which checks their hashes.

    Those that lie there already, from a bundle that was broken off, are not downloaded again, nor are those in `built`.
    """
    lines = {
        (name, version): requirement(name, version, hashes) for (name, version), hashes in sorted(requirements.items())
    }
    record, listing = folder / "all.txt", folder / "next.txt"
    content = f"# {target}\n{''.join(lines.values())}"
    if not record.exists() or record.read_text(encoding="utf-8") != content:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        record.write_text(content, encoding="utf-8")
    for path in built.glob("*.whl") if built else ():
        shutil.copyfile(path, folder / path.name)
    for path in folder.glob("*.whl"):
        name, version = path.name.split("-")[:2]
        if sha256(path) in requirements.get((canonical(name), version), []):
            del lines[canonical(name), version]
    pip = [sys.executable, "-P", "-m", "pip"]
    if target.native:
        command = [*pip, "wheel", "--wheel-dir", str(folder)]
    else:
        names = [*(f"manylinux_2_{minor}" for minor in range(target.glibc[1], 4, -1)), *OLD_NAMES, "linux"]
        command = [*pip, "download", "--dest", str(folder), "--only-binary", ":all:", "--implementation", "cp"]
        command += ["--python-version", target.python]
        command += [word for name in names for word in ("--platform", f"{name}_{target.machine}")]
    command += ["--no-deps", "--require-hashes", "--requirement", str(listing)]
    environment = pip_environment()
    for start in range(0, len(lines), BATCH):
        listing.write_text("".join(list(lines.values())[start : start + BATCH]), encoding="utf-8")
        call(command, environment)
    return sorted(folder.glob("*.whl"))


def wanted_glibc(wheel: str, target: Target) -> tuple[int, int]:
    """The glibc that a wheel wants by its name; one that was built here, or does not say, wants the target's."""
    found = []
    for tag in wheel.removesuffix(".whl").split("-")[-1].split("."):
        match = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", tag)
        old = OLD_NAMES.get(tag.partition("_")[0], target.glibc)
        found.append((0, 0) if tag == "any" else (int(match[1]), int(match[2])) if match else old)
    return min(found)


class Parts:
    """A file to write to that lies in several, none of them larger than `size` bytes."""

    def __init__(self, folder: Path, name: str, size: int) -> None:
        self.folder, self.name, self.size = folder, name, size
        self.sums: dict[str, str] = {}  # SHA-256 by name, of the parts that are whole
        self._left, self._hash = 0, hashlib.sha256()
        self._file: BinaryIO | None = None

    def write(self, data: bytes) -> int:
        """Append to the last part, and begin others where it is full."""
        rest = memoryview(data)
        while rest:
            if not self._left:
                self.close()
                self._file = (self.folder / f"{self.name}.{len(self.sums):03d}").open("wb")
                self._left, self._hash = self.size, hashlib.sha256()
            piece, rest = rest[: self._left], rest[self._left :]
            self._file.write(piece)
            self._hash.update(piece)
            self._left -= len(piece)
        return len(data)

    def close(self) -> None:
        """End the last part."""
        if self._file:
            self._file.close()
            self.sums[Path(self._file.name).name] = self._hash.hexdigest()
            self._file = None


def pack(folder: Path, name: str, files: Mapping[str, Path], size: int) -> dict[str, str]:
    """Write `files`, by their names inside, as parts of a tar file; the SHA-256 of each part."""
    parts = Parts(folder, f"{name}.tar", size)
    with tarfile.open(fileobj=parts, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for inside, path in sorted(files.items()):
            member = tarfile.TarInfo(inside)  # without date and owner
            member.size = path.stat().st_size
            member.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)
    parts.close()
    return parts.sums


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("pins", type=Path, help="requirements file with name==version lines")
    arguments.add_argument("out", type=Path, help="folder to write")
    arguments.add_argument("--part-size", type=part_size, default="1G", help="most bytes of a part (default 1G)")
    arguments.add_argument("--python-version", help="the target's Python, such as 3.12 (default: this one)")
    arguments.add_argument("--platform", help="the target's platform, as wheels spell it (default: this machine's)")
    options = arguments.parse_args()
    if not options.pins.is_file():
        known = ", ".join(sorted(path.stem for path in options.pins.parent.glob("*.txt")))
        raise UserError(f"{options.pins}: no such file of pins; there are: {known or 'none'}")
    target = find_target(options.python_version, options.platform)

    environment = uv_environment(pip_config(pip_listing()), os.environ)
    with write_atomically(options.out) as folder, work_folder(options.out) as work:
        requirements = resolve(options.pins, target, work, environment)
        downloads = work.with_name(f".{options.out.name}.wheels")
        wheels = fetch(find_pip(options.pins) | requirements, target, downloads, work)
        files = {f"wheels/{path.name}": path for path in wheels}
        if options.pins.stem == "llama_cpp":  # the environment is to compile these
            sources = fetch_sources(options.pins.with_name("llama-cpp-python.sdist"))
            inside = (path for path in sources.rglob("*") if path.is_file() and path.name != ".lock")
            files |= {f"cache/{sources.name}/{path.relative_to(sources)}": path for path in inside}
        folder.mkdir()
        sums = pack(folder, options.pins.stem, files, options.part_size)
        shutil.copyfile(UNPACK, folder / "unpack.py")
        glibc = max(wanted_glibc(path.name, target) for path in wheels)
        content = {
            "bundle": options.pins.stem,
            "python": target.python,
            "machine": target.machine,
            "glibc": f"{glibc[0]}.{glibc[1]}",
            "parts": list(sums),
            "packages": [f"{name}=={version}" for name, version in sorted(requirements)],
            "packed_bytes": sum(path.stat().st_size for path in files.values()),
            "installed_bytes": sum(each.file_size for path in wheels for each in zipfile.ZipFile(path).infolist()),
        }
        (folder / NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sums |= {name: sha256(folder / name) for name in (NAME, "unpack.py")}
        (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()), encoding="utf-8")
        shutil.rmtree(downloads)
    print(
        f"{options.out}: {options.pins.stem} for {target}: {len(wheels)} wheels, "
        f"{content['packed_bytes'] / 1e6:.0f} MB in {len(content['parts'])} parts, "
        f"{content['installed_bytes'] / 1e6:.0f} MB unpacked. Copy the folder, and there run: "
        f"python{target.python} unpack.py FOLDER"
    )
