"""What a study recorded, as strangers may read it: without this machine's places.

Nothing here changes an artifact. Paths of its user, addresses of servers and the study's other models are left out.
"""

import io
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import huggingface_hub

from common.program import UserError
from planning.config import CHECKOUT, TEXTS

PLACE = re.compile(r"(?<![\w./:])(?:~|(?<!-)/[\w.@+=,~-]+)(?:/[\w.@+=,~-]+)*/?")  # an absolute path in a text
OF_SERVERS = ("url", "authority", "token_variable")  # options of a run that say where its server is
OF_MACHINES = ("interpreters", "llama_cpp", "publish", "serving")  # keys of a study that rebuild nothing
SERVER = re.compile(r"https?://(?!huggingface\.co\b)[^\s\"'<>()]*[\w/\]]")  # the address of one that is not the hub
PIECE = 2**20
CHECKPOINT = "checkpoint"  # what a published study calls a folder whose path is nobody's business


def scrub(value: Any) -> Any:
    """The same JSON without absolute paths, which become `PATH`, and addresses of servers, which become `SERVER`."""
    if isinstance(value, str):
        return PLACE.sub("PATH", SERVER.sub("SERVER", value))
    if isinstance(value, dict):
        return {key: scrub(each) for key, each in value.items()}
    return [scrub(each) for each in value] if isinstance(value, list) else value


def source(found: Mapping[str, Any]) -> dict[str, Any]:
    """Where weights came from: a repository of the hub with its commit, or the hashes alone."""
    return {key: value for key, value in found.items() if key != "path"}


def row(found: Mapping[str, Any]) -> dict[str, Any]:
    """A row of results.json."""
    kept = scrub(deepcopy(dict(found)))
    kept["options"] = {key: value for key, value in kept["options"].items() if key not in OF_SERVERS}
    if kept["artifact"]:
        kept["artifact"] = kept["artifact"] | {"source": source(kept["artifact"]["source"])}
    return kept


def study(config: Mapping[str, Any], model: str, artifacts: Sequence[str]) -> dict[str, Any]:
    """A study that builds and measures one model's artifacts again, in the words of config/README.md. Tasks of its
    author's own, whose files are not published, are left out."""
    wanted = list(dict.fromkeys([config["reference"], *artifacts]))
    variants = {name: words for name, words in config["variants"].items() if name in wanted}
    bases = (variants.get(name, {"format": name})["format"] for name in artifacts)
    # the reference is named, also where it is a variant
    formats = list(dict.fromkeys([config["reference"], *bases]))
    runs = {
        name: words | {"formats": [each for each in words["formats"] if each in artifacts]}
        for name, words in config["runs"].items()
        if "url" not in words and set(artifacts) & {*words["formats"]}
    }
    origin = config["models"][model]["source"]
    if isinstance(origin, dict) and "path" in origin:
        origin = {"path": CHECKPOINT}
    texts = {kind: text for kind, text in config["models"][model]["texts"].items() if text != TEXTS[kind][0]}
    texts = {kind: f"{kind}.txt" if isinstance(text, str) else text for kind, text in texts.items()}
    left_out = OF_MACHINES + (("tasks",) if "include" in config.get("tasks", {}) else ())
    kept = {key: value for key, value in config.items() if key not in left_out}
    changed = {"models": {model: {"source": origin}}, "formats": formats, "variants": variants, "runs": runs}
    return scrub(deepcopy(kept | changed | {"texts": texts}))


def results(content: Mapping[str, Any], model: str, artifacts: Sequence[str]) -> dict[str, Any]:
    """results.json with the rows, loads and tasks of a model's artifacts alone, in the study's order."""

    def ours(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [each for each in rows if each["model"] == model and each["format"] in artifacts]

    changed = {
        "config": study(content["config"], model, artifacts),
        "rows": [row(each) for each in ours(content["rows"])],
    }
    others = {name: scrub(list(ours(content.get(name, ())))) for name in ("loads", "tasks")}
    kept = {name: value for name, value in content.items() if name not in others}
    return {**kept, **changed, **{name: entries for name, entries in others.items() if entries}}


def check(files: Mapping[str, Path | bytes]) -> None:
    """Raises `UserError` for a file that holds a path of this machine or its user, or the token. A last look: what
    Quantmill writes holds none, but a checkpoint's other files, which go along, may hold anything."""
    secrets = {str(place): "a path of this machine" for place in places()}
    if token := huggingface_hub.get_token():
        secrets[token] = "your token"
    for name, content in files.items():
        if secret := find(content, [each.encode() for each in secrets]):
            what = secrets[secret.decode()]
            raise UserError(f"{name}: holds {what}, which nobody is to read; remove it from the file, build again")


def places() -> list[Path]:
    """Folders whose paths say something of this machine: not `/root`, say, which any text may hold."""
    folders = (Path.cwd(), CHECKOUT.resolve(), Path.home())
    return [folder for folder in dict.fromkeys(folders) if len(folder.parts) > 2]


def find(content: Path | bytes, needles: Sequence[bytes]) -> bytes | None:
    """The first of some byte strings that bytes, or a file's, hold; read in pieces, each with the end of the last."""
    overlap, end = max(map(len, needles), default=1), b""
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        while piece := file.read(PIECE):
            window = end + piece
            if found := next((needle for needle in needles if needle in window), None):
                return found
            end = window[-overlap:]
    return None
