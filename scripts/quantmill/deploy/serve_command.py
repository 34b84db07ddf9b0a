"""Print the commands that serve a cell's artifact with the options of its measurement.

They are a command line, `docker run` and a compose file. Snakemake's own Python runs it, and it starts nothing.

    make serve-command CELL=MODEL/FORMAT@RUN [CONFIG=study.yaml]
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmill import devices
from quantmill.common import manifest
from quantmill.common.program import UserError, parser, printable, suggestion
from quantmill.deploy.deployment import HOST, MODEL, PORT, Deployment, command_line, compose, docker
from quantmill.engines.served.started import deployable, underscored
from quantmill.plan.list_jobs import describe
from quantmill.plan.model_source import CHECKOUT
from quantmill.report.labels import label
from quantmill.servers import lifecycle
from quantmill.servers.endpoint import Endpoint


def find(listed: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the cell of this name. Raises `UserError` if the study does not have it."""
    cells = {f"{cell['model']}/{label(cell)}": cell for cell in listed["cells"]}
    if name not in cells:
        raise UserError(f"no cell is called {name!r}{suggestion(name, cells)}")
    return cells[name] | {"name": name}


def check_server(cell: Mapping[str, Any], listed: Mapping[str, Any]) -> None:
    """Raise `UserError` for a cell whose engine is not a server of ours; it names a run that is one."""
    engine, layout, format = cell["engine"], cell["layout"], cell["format"]
    known = {name: loads for name, loads in listed["servers"].items() if deployable(name)}
    if engine in known:
        return
    servers = [name for name, loads in known.items() if layout in loads]
    why = f"{cell['name']}: {engine} is not a server that Quantmill starts"
    if not servers:
        raise UserError(f"{why}, and none of them loads its layout, {layout}; serve it with {engine}'s own tools")
    words = {"engine": servers[0], "formats": [format]}
    if engine == "vllm":  # the same library, which takes the same options
        words |= {name: cell[name] for name, nothing in (("options", {}), ("gpus", 1)) if cell[name] != nothing}
    add = f"add a run, runs: {json.dumps({'served': words})}"
    raise UserError(f"{why}; its layout, {layout}, is served by {', '.join(servers)}: {add}")


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
    artifact, kind, name = Path(cell["artifact"]), deployable(cell["engine"]), cell["name"]
    assert kind, "check_server has passed"
    if not (artifact / manifest.NAME).is_file():
        raise UserError(f"{name}: {artifact} does not exist yet; build it: make report")
    about = manifest.read(artifact)
    file = next((Path(each) for each in (cell["latency"], cell["loads"]) if each and Path(each).is_file()), None)
    result = json.loads(file.read_text(encoding="utf-8")) if file else {}
    measured = f"measured ({file})" if file else "not measured yet"
    same = all(result.get(each) == cell[each] for each in ("engine", "options", "gpus"))
    if file and not (same and result["artifact"].get("files") == about.get("files")):
        result, measured = {}, f"not measured: {file} is of other options or another artifact; measure it again"

    asked = listed["study"]["device"]
    there = devices.resolve(asked, hold=False) if asked == "auto" else asked
    device = result["device"]["device"] if result else there
    gpus = cell["gpus"] if device == "cuda" else 0
    versions = result.get("versions", {})
    recorded = versions.get(kind.package)
    threads = re.search(r"--threads (\d+)", versions.get("arguments", ""))
    processors = int(threads[1]) if threads else len(lifecycle.divide_processors()[1])

    given = json.loads(json.dumps(cell["options"], sort_keys=True))  # in the order that jobs are given them
    options, paths = local(underscored(given))
    environment = kind.variables(gpus) | options.pop("environment", {})
    kind.check_ours(options)

    def words(folder: str) -> list[str]:
        place = Endpoint(folder, f"{cell['model']}/{cell['format']}", HOST, PORT)
        return kind.words(artifact, place, gpus, processors, options)

    env = kind.env(gpus)
    python = listed["study"]["interpreters"].get(env) or str((CHECKOUT / f"envs/{env}/bin/python").absolute())
    image, what = kind.image(None if recorded == "unknown" else recorded, gpus)
    folders = {str(artifact.absolute()): MODEL} | {path: path for path in paths}
    deployed = Deployment(image, kind.entrypoint, words(MODEL), environment, folders, gpus)
    line = command_line(kind.program_here(python), words(str(artifact.absolute())), environment)
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
