"""Build a virtual environment from a pinned file, with uv and with pip's own settings.

    python scripts/quantmill environments.create envs/torch.txt envs/torch

uv is fast but does not read pip's configuration (a mirror, a folder of wheels, a proxy's certificate). So its settings
are passed to uv; uv's own settings take precedence.
"""

import ast
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from quantmill.common import surroundings
from quantmill.common.program import UserError, parser, run_child

# pip's option -> (uv's variable, its separator between values)
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "no-index": ("UV_NO_INDEX", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("HTTPS_PROXY", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
}


def pip_listing() -> str:
    """Return the output of `pip config list`; empty if this Python has no pip."""
    return run_child([sys.executable, "-P", "-m", "pip", "config", "list"], stdout=subprocess.PIPE).stdout


def pip_config(listing: str) -> dict[str, str]:
    """Parse the output of `pip config list`. The environment outranks files, `install` outranks `global`."""
    ranked: dict[str, tuple[int, str]] = {}
    ranks = {"global": 0, "install": 1, ":env:": 2}
    for line in listing.splitlines():
        match = re.fullmatch(r"(global|install|:env:)\.([\w-]+)=(.*)", line)
        if match:
            section, option, value = match.groups()
            rank = ranks[section]
            if rank >= ranked.get(option, (-1, ""))[0]:
                ranked[option] = rank, str(ast.literal_eval(value))
    return {option: value for option, (_, value) in ranked.items()}


def uv_environment(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with pip's options in uv's variables. Variables that are already set stay."""
    result = dict(environment)
    for option, (variable, separator) in SETTINGS.items():
        if options.get(option):
            result.setdefault(variable, separator.join(options[option].split()))
    if "extra-index-url" in options:  # pip takes the best version of all indexes, uv that of the first that has any
        result.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    return result


def find_uv(pins: Path) -> list[str]:
    """Return the command of uv: next to this Python, on the PATH, or installed by pip at bootstrap.txt's version."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found:
        return [found]
    bootstrap = (pins.parent / "bootstrap.txt").read_text(encoding="utf-8")
    version = re.search(r"^uv==([\w.]+)", bootstrap, re.MULTILINE)
    if version is None:
        raise UserError(f"{pins.parent / 'bootstrap.txt'}: pins no uv; restore the line uv==…")
    folder = pins.parent / ".uv" / version[1]
    ready = folder / "ready"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several environments are built at a time; one job fetches uv
        if not ready.exists():
            call([sys.executable, "-P", "-m", "venv", "--clear", str(folder)], os.environ)
            call([str(folder / "bin" / "pip"), "install", "--quiet", f"uv=={version[1]}"], os.environ)
            ready.touch()
    return [str(folder / "bin" / "uv")]


def call(command: list[str], environment: Mapping[str, str]) -> None:
    """Run pip or uv and print its errors. Raises `UserError` with the last error of a command that fails."""
    whole = {**environment, "UV_NO_WRAP": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}  # an error stands on one line
    result = subprocess.run(command, env=surroundings.of_child(command, whole), stderr=subprocess.PIPE, text=True)
    sys.stderr.write(result.stderr)
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()] or [f"exit {result.returncode}"]
        start = max((number for number, line in enumerate(lines) if line.lower().startswith("error:")), default=-1)
        raise UserError(
            f"{' '.join(command)} failed ({' '.join(lines[start:])}). A package that failed to build wants a C++ "
            "compiler and Python's headers: install them, or leave out the formats that use this environment "
            "(config/README.md, `formats`)"
        )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("pins", type=Path, help="requirements file with name==version lines")
    arguments.add_argument("env", type=Path, help="folder of the environment; replaced if it exists")
    options = arguments.parse_args()
    if not options.pins.is_file():
        raise UserError(f"{options.pins}: no such file of pins")

    environment = uv_environment(pip_config(pip_listing()), os.environ)
    environment.setdefault("DISABLE_CUDA", "1")  # HQQ's setup.py would compile kernels with any Python on the PATH
    uv = find_uv(options.pins)
    try:
        # built in place: an environment's scripts hold its path, so it cannot be renamed
        call([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(options.env)], environment)
        python = str(options.env / "bin" / "python")
        override = options.pins.with_suffix(".override")  # replaces requirements that no index has
        more = ["--override", str(override)] if override.exists() else []
        call([*uv, "pip", "install", "--python", python, "--requirements", str(options.pins), *more], environment)
    except BaseException:
        shutil.rmtree(options.env, ignore_errors=True)
        raise
