"""Download an environment for a machine without a network, with what pip needs to install it there.

    python scripts/quantmill environments.bundle envs/vllm.txt OUT [--python-version 3.12] [--platform
        manylinux_2_31_x86_64]
    python3.12 -m venv --without-pip FOLDER                                         # on the other machine
    FOLDER/bin/python OUT/pip.whl/pip --isolated install --no-deps --requirement OUT/requirements.txt

pip downloads the wheels and installs them. Three things pip cannot do, and they are done here:

- torch has no hashes in the pins, and the CUDA packages that it requires are not pinned. uv resolves them.
- pip evaluates markers for the Python that runs it. uv resolves them for the target.
- Some packages have no wheel. For this machine pip builds one. For another target it must hold Python alone (`PURE`).

OUT/requirements.txt names each wheel with its SHA-256, and tells pip to use this folder and no index.
"""

import json
import os
import platform
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, ignore_patterns

from quantmill.common.atomic import write_atomically
from quantmill.common.manifest import NAME, sha256
from quantmill.common.program import UserError, parser
from quantmill.environments.create import call, find_uv, pip_config, pip_listing, uv_environment
from quantmill.llamacpp.compile import fetch_sources

REQUIREMENT = re.compile(r"^([a-z0-9][\w.-]*)(?:\[[^]]*\])?==([^\s;\\]+)(.*?)(?=^\S|\Z)", re.I | re.M | re.S)
OLD_TAGS = ("manylinux1", "manylinux2010", "manylinux2014", "linux")
UV_KNOWS = (17, 28, *range(31, 41))  # glibc 2.* of uv's platforms x86_64-manylinux_2_*
PURE = ("connection-pool",)  # Snakemake requires it; it has no wheel, and one that is built here serves every Python
LONG_AGO = "315532800"  # 1980, the first year of a zip file
PIP = [sys.executable, "-P", "-m", "pip"]

Pins = dict[tuple[str, str], list[str]]  # (name, version) -> SHA-256 of its files


@dataclass(frozen=True)
class Target:
    """The machine that a bundle is for: Python 3.x, processor, minor version of glibc 2, and whether it is this one."""

    python: str
    machine: str
    glibc: int
    native: bool

    def __str__(self) -> str:
        return f"Python {self.python} on manylinux_2_{self.glibc}_{self.machine}"


def find_target(python: str | None, wanted: str | None) -> Target:
    """Return the machine that the options name, by default this one. Raises `UserError` if no wheels exist for it."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python and not re.fullmatch(r"3\.\d+", python):
        raise UserError(f"--python-version {python}: is not a version such as 3.12")
    library, version = platform.libc_ver()
    tag = wanted or f"manylinux_{version.replace('.', '_')}_{platform.machine()}"
    match = re.fullmatch(r"manylinux_2_(\d+)_(x86_64|aarch64)", tag)
    if not match or not (wanted or library == "glibc"):
        raise UserError(
            f"--platform {tag}: is not a Linux with glibc; name the target's, such as manylinux_2_28_x86_64"
        )
    return Target(python or here, match[2], int(match[1]), not wanted and python in (None, here))


def read_pins(path: Path) -> Pins:
    """Read the pins of a requirements file, whatever their markers."""
    found = REQUIREMENT.findall(path.read_text(encoding="utf-8"))
    return {(canonical(name), version): re.findall(r"--hash=sha256:(\w+)", rest) for name, version, rest in found}


def canonical(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def write_pins(pins: Pins, path: Path, *options: str) -> None:
    """Write a requirements file."""
    lines = [
        " ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in hashes)])
        for (name, version), hashes in sorted(pins.items())
    ]
    path.write_text("\n".join([*options, *lines]) + "\n", encoding="utf-8")


def resolve(pins: Path, target: Target, folder: Path, environment: Mapping[str, str]) -> Pins:
    """Return what an installation from `pins` takes on the target, with hashes. `folder` has wheels of its own.

    Raises `UserError` if a package has no wheel for the target, or the environment is not for it.
    """
    output = folder / "requirements.txt"
    command = [*find_uv(pins), "pip", "compile", str(pins), "--generate-hashes", "--quiet", "--no-header"]
    command += ["--no-annotate", "--output-file", str(output), "--python", sys.executable]  # or uv asks every Python
    override = pins.with_suffix(".override")
    command += ["--override", str(override)] if override.exists() else []
    if not target.native:
        newest = max((minor for minor in UV_KNOWS if minor <= target.glibc), default=UV_KNOWS[0])
        command += ["--python-platform", f"{target.machine}-manylinux_2_{newest}", "--python-version", target.python]
        command += ["--no-build"]
        # the option --find-links would replace the links of pip's settings
        links = [environment.get("UV_FIND_LINKS", ""), str(folder)]
        environment = {**environment, "UV_FIND_LINKS": ",".join(filter(None, links))}
    call(command, environment)
    resolved, pinned = read_pins(output), read_pins(pins)
    asked = pins.with_suffix(".in").read_text(encoding="utf-8") if pins.with_suffix(".in").exists() else ""
    names = {canonical(name) for name in re.findall(r"^[a-z0-9][\w.-]*", asked, re.I | re.M)}
    if missing := names - {name for name, _ in resolved}:
        raise UserError(f"{pins}: not an environment for {target}, which lacks {', '.join(sorted(missing))}")
    return {key: pinned.get(key) or hashes for key, hashes in resolved.items()}


def download(pins: Pins, target: Target, folder: Path) -> None:
    """Let pip download the wheels of `pins` for the target to `folder`. It checks their hashes."""
    listing = folder / "requirements.txt"
    write_pins(pins, listing)
    if target.native:
        command = [*PIP, "wheel", "--wheel-dir", str(folder)]
    else:
        tags = [*(f"manylinux_2_{minor}" for minor in range(target.glibc, 4, -1)), *OLD_TAGS]
        command = [*PIP, "download", "--dest", str(folder), "--only-binary", ":all:", "--implementation", "cp"]
        command += ["--python-version", target.python]
        command += [word for tag in tags for word in ("--platform", f"{tag}_{target.machine}")]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": LONG_AGO}  # so that the same source gives the same wheel
    call([*command, "--no-deps", "--require-hashes", "--requirement", str(listing)], environment)


def pack(pins: Path, target: Target, folder: Path) -> None:
    """Fill `folder` with wheels, their requirements.txt and pip. Raises `UserError` if a wheel cannot be had."""
    pip = {key: hashes for key, hashes in read_pins(pins.with_name("bootstrap.txt")).items() if key[0] == "pip"}
    if not pip:
        raise UserError(f"{pins.with_name('bootstrap.txt')}: pins no pip; restore the line pip==…")
    download(pip, target, folder)
    next(folder.glob("pip-*.whl")).rename(folder / "pip.whl")  # for a Python without a pip of its own
    built = {key: hashes for key, hashes in read_pins(pins).items() if key[0] in PURE and not target.native}
    if built:
        download(built, find_target(None, None), folder)
        if other := [path.name for path in folder.glob("*-*.whl") if not path.name.endswith("-py3-none-any.whl")]:
            raise UserError(f"{other[0]}: this wheel, built here, is not for every Python; pack with the target's")
    requirements = resolve(pins, target, folder, uv_environment(pip_config(pip_listing()), os.environ))
    download({key: hashes for key, hashes in requirements.items() if key not in built}, target, folder)
    named = {path: path.name.split("-") for path in folder.glob("*-*.whl")}
    wheels = {(canonical(words[0]), words[1]): [sha256(path)] for path, words in named.items()}
    write_pins(wheels, folder / "requirements.txt", "--no-index", "--find-links .")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("pins", type=Path, help="requirements file with name==version lines")
    arguments.add_argument("out", type=Path, help="folder to write")
    arguments.add_argument("--python-version", help="the target's Python, such as 3.12 (default: this one)")
    arguments.add_argument("--platform", help="the target's platform, as wheels spell it (default: this machine's)")
    options = arguments.parse_args()
    if not options.pins.is_file():
        known = ", ".join(sorted(path.stem for path in options.pins.parent.glob("*.txt")))
        raise UserError(f"{options.pins}: no such file of pins; there are: {known or 'none'}")
    target = find_target(options.python_version, options.platform)
    with write_atomically(options.out) as folder:
        folder.mkdir()
        pack(options.pins, target, folder)
        if options.pins.stem == "llama_cpp":  # the environment is to compile these
            sources = fetch_sources(options.pins.with_name("llama-cpp-python.sdist"))
            copytree(sources, folder / "cache" / sources.name, ignore=ignore_patterns(".lock"))
        (folder / NAME).write_text(json.dumps({"bundle": options.pins.stem, "target": str(target)}) + "\n")
        wheels = list(folder.glob("*-*.whl"))
        packed = sum(path.stat().st_size for path in wheels)
        unpacked = sum(each.file_size for path in wheels for each in zipfile.ZipFile(path).infolist())
    print(
        f"{options.out}: {options.pins.stem} for {target}: {len(wheels)} wheels, {packed / 1e6:.0f} MB, "
        f"{unpacked / 1e6:.0f} MB installed. Copy the folder, and there run:\n"
        f"  python{target.python} -m venv --without-pip FOLDER\n"
        f"  FOLDER/bin/python {options.out.name}/pip.whl/pip --isolated install --no-deps "
        f"--requirement {options.out.name}/requirements.txt\n"
        f"In the study's config:\n  interpreters: {{{options.pins.stem}: FOLDER/bin/python}}"
    )
