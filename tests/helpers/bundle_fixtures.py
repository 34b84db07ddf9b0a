"""A small environment to be packed, of wheels that are made here, and what packs and unpacks it.

The network is off in a namespace of its own (`unshare -rn`) where that is allowed. In any case every index and proxy
that is set leads to a closed port.
"""

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
from wheels import write_wheel

MINOR = sys.version_info.minor
PART = 2**20  # bytes
NAMESPACE = ["unshare", "-rn"]
OFF = NAMESPACE if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0 else []
CLOSED = "http://127.0.0.1:9"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def envs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pins, and the wheels. probe-top has no hash and asks for probe-cuda, which is pinned nowhere, as
    torch does. probe-old is for older Pythons than this."""
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
    wheel = write_wheel(wheels, "pip", pip.version, files)
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
        """The line of a refusal, which may leave wheels for the next try; None where it went well."""
        settings = {"PIP_FIND_LINKS": str(envs / "wheels"), "PIP_NO_INDEX": "1", "PIP_CACHE_DIR": str(cache / "pip")}
        settings |= {"UV_CACHE_DIR": str(cache / "uv")} | environment
        command = [
            sys.executable,
            "scripts/quantmill",
            "environments.bundle",
            envs / f"{env}.txt",
            out,
            "--part-size",
            "1M",
            *options,
        ]
        result = call(*command, **settings)
        hidden = {path.name for path in out.parent.glob(f".{out.name}.*")}
        assert hidden <= ({f".{out.name}.wheels"} if result.returncode else set())
        if result.returncode == 0:
            return None
        assert "Traceback" not in result.stderr
        return result.stderr.splitlines()[-1]

    return run


@pytest.fixture(scope="session")
def packed(pack: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, which nobody changes."""
    out = tmp_path_factory.mktemp("packed") / "out"
    assert pack(out) is None
    return out


def unpack(call: Callable, folder: Path, target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run unpack.py with the network off; what is set for pip would make it fail."""
    closed = {"PIP_INDEX_URL": CLOSED, "PIP_NO_BINARY": ":all:", "https_proxy": CLOSED, "http_proxy": CLOSED}
    return call(*OFF, sys.executable, folder / "unpack.py", target, **closed | environment)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    """Until it is there, and the process is at work on it."""
    end = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, f"ended before {path} was there"
        assert time.monotonic() < end
        time.sleep(0.002)
