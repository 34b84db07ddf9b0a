"""A small environment to pack, of wheels that are made here, and functions that pack and install it.

The network is off in a network namespace (`unshare -rn`) where that is allowed. In any case every index and proxy that
is set leads to a closed port.
"""

import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import Distribution, distribution
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path

import pytest
from wheels import write_wheel

MINOR = sys.version_info.minor
NAMESPACE = ["unshare", "-rn"]
OFF = NAMESPACE if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0 else []
CLOSED = "http://127.0.0.1:9"


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def with_bytecode(package: Distribution) -> dict[str, bytes]:
    """Return a package's bytecode as a zip holds it: each start from the wheel would compile the modules again."""
    found = {}
    for path in package.files or []:
        kept = Path(cache_from_source(str(path.locate()))) if path.suffix == ".py" else None
        if kept and kept.is_file() and kept.read_bytes()[:4] == MAGIC_NUMBER:
            unchecked = MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)  # PEP 552
            found[f"{path}c"] = unchecked + kept.read_bytes()[16:]
    return found


@pytest.fixture(scope="session")
def envs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write pins and wheels. Like torch, probe-top has no hash and requires probe-cuda, which is not pinned.

    probe-old is for older Pythons than this one.
    """
    folder = tmp_path_factory.mktemp("envs")
    wheels = folder / "wheels"
    wheels.mkdir()
    top = {
        "probe_top.py": b"import sys\nfrom probe_cuda import ANSWER\ndef main():\n    print(sys.prefix)\n",
        "probe_top-1.0.dist-info/entry_points.txt": b"[console_scripts]\nprobe = probe_top:main\n",
    }
    write_wheel(wheels, "probe_top", "1.0", top, requires="probe-cuda >=1.0")
    write_wheel(wheels, "probe_cuda", "1.0", {"probe_cuda.py": b"ANSWER = 42\n"})
    old = write_wheel(wheels, "probe_old", "1.0", {"probe_old.py": b""})
    both = write_wheel(wheels, "probe_both", "1.0", {"probe_both.py": b""})
    pip = distribution("pip")
    files = {
        str(path): path.read_binary() for path in pip.files if str(path).startswith("pip/") and path.suffix != ".pyc"
    }
    wheel = write_wheel(wheels, "pip", pip.version, files | with_bytecode(pip))
    (folder / "bootstrap.txt").write_text(f"pip=={pip.version} \\\n    --hash=sha256:{digest(wheel)}\n")
    (folder / "probe.in").write_text("probe-top==1.0\nprobe_both # as indexes spell it\n")
    (folder / "probe.txt").write_text(
        "probe-top==1.0\n"
        f"probe-both==1.0 ; sys_platform == 'linux' \\\n    --hash=sha256:{digest(both)}\n"
        f"probe-old==1.0 ; python_full_version < '3.{MINOR}' \\\n    --hash=sha256:{'0' * 64} \\\n"
        f"    --hash=sha256:{digest(old)}\n"
    )
    return folder


@pytest.fixture(scope="session")
def pack(envs: Path, call: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    cache = tmp_path_factory.mktemp("cache")

    def run(out: Path, *options: object, env: str = "probe", **environment: str) -> str | None:
        """Return the error line, or None."""
        settings = {"PIP_FIND_LINKS": str(envs / "wheels"), "PIP_NO_INDEX": "1", "PIP_CACHE_DIR": str(cache / "pip")}
        settings |= {"UV_CACHE_DIR": str(cache / "uv")} | environment
        program = (sys.executable, "scripts/quantmill", "environments.bundle")
        result = call(*program, envs / f"{env}.txt", out, *options, **settings)
        assert not list(out.parent.glob(f".{out.name}.*"))
        assert "Traceback" not in result.stderr
        return result.stderr.splitlines()[-1] if result.returncode else None

    return run


@pytest.fixture(scope="session")
def packed(pack: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle that no test changes."""
    out = tmp_path_factory.mktemp("packed") / "out"
    assert pack(out) is None
    return out


def install(call: Callable, folder: Path, target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Install a bundle with the network off, by the commands of docs/CLUSTER.md; pip's settings would make it fail."""
    closed = {"PIP_INDEX_URL": CLOSED, "PIP_NO_BINARY": ":all:", "https_proxy": CLOSED, "http_proxy": CLOSED}
    call(sys.executable, "-m", "venv", "--without-pip", target)
    pip = (target / "bin/python", folder / "pip.whl/pip", "--isolated", "install", "--no-deps")
    return call(*OFF, *pip, "--requirement", folder / "requirements.txt", **closed | environment)
