"""What a study recorded, as strangers may read it: fields and values of an allow-list, and nothing else.

Nothing here changes an artifact. A text goes out only if it is made of known words
(scripts/quantmill/publish/words.py). What is held back is listed, so that the user sees it before anything is sent.
"""

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import yaml

from quantmill.common.program import PACKAGE, UserError
from quantmill.plan.config import CHECKOUT, TEXTS
from quantmill.publish import words

SCHEMA = PACKAGE / "report/results.schema.json"
CONFIG_SCHEMA = CHECKOUT / "config/config.schema.yaml"
WITHHELD = "not published"  # in place of a value
FAILED = "failed: the reason is not published"
TOP = ("schema_version", "metrics_version", "units", "config", "rows", "loads", "tasks")  # of results.json
OF_SERVERS = ("url", "authority", "token_variable")  # options of a run that say where its server is
OF_MACHINES = ("interpreters", "llama_cpp", "publish", "loads")  # keys of a study that rebuild nothing
# last words of options whose values are places or secrets, whatever they look like
PLACES = {"address", "cache", "dir", "directory", "endpoint", "file", "folder", "home", "host", "hostname", "key"}
PLACES |= {"password", "path", "proxy", "root", "secret", "server", "socket", "token", "url", "user", "username"}
OPTIONS = ("options", "parameters", "environment")  # free mappings, of the study's config or of a tool
# fields whose texts come from logs, devices and servers too: each word has to be known
SENTENCES = ("missing", "warnings", "interference", "differs", "refused", "skipped", "notes", "unchecked", "reason")
SENTENCES += ("units", "versions by its server")
DEVICES = ("device", "name")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\.(safetensors|bin|json|gguf|txt|model)", re.ASCII)
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
IN_A_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*", re.ASCII)  # a file, or a revision
PIECE = 2**20
CHECKPOINT = "checkpoint"  # what a published study calls a folder whose path is nobody's business


@dataclass
class Public:
    """Copies values that strangers may read. `names`: of the study's models, formats, runs, engines and tasks;
    `withheld`: where something was held back, filled by each call."""

    names: frozenset[str] = frozenset()
    withheld: list[str] = field(default_factory=list)

    def value(self, found: Any, *where: str) -> Any:
        """The same JSON with `WITHHELD` or `FAILED` in place of each text that is not known to be harmless, and without
        entries whose key is not. `where`: the names that lead to it."""
        if isinstance(found, Mapping):
            return self._mapping(found, where)
        if isinstance(found, list | tuple):
            return [self.value(each, *where) for each in found]
        if found is None or isinstance(found, bool | int) or (isinstance(found, float) and math.isfinite(found)):
            return found
        if isinstance(found, str) and self.is_harmless(found, where):
            return found
        self.withheld.append(f"{'.'.join(where)}: {found!r:.100}")
        return FAILED if isinstance(found, str) and found.startswith("failed") else WITHHELD

    def _mapping(self, found: Mapping[Any, Any], where: tuple[str, ...]) -> dict[str, Any]:
        kept = {}
        for key, each in found.items():
            if not isinstance(key, str) or not self.is_key(key, where):
                self.withheld.append(f"{'.'.join((*where, repr(key)[:60]))}: its name")
            elif key in OF_SERVERS and "options" in where:
                self.withheld.append(f"{'.'.join((*where, key))}: {each!r:.100}")
            elif is_place(key) and set(OPTIONS) & {*where} and isinstance(each, str):
                self.withheld.append(f"{'.'.join((*where, key))}: {each!r:.100}")
                kept[key] = WITHHELD
            else:
                kept[key] = self.value(each, *where, key)
        return kept

    def is_key(self, key: str, where: tuple[str, ...]) -> bool:
        """Whether a key may be read: a field's name, a name of the study, or a file of the weights."""
        if key in self.names or ("sha256" in where[-1:] and FILE.fullmatch(key)):
            return True
        return words.is_name(key) or ("/" not in key and words.is_sentence(key, self.names))

    def is_harmless(self, text: str, where: tuple[str, ...]) -> bool:
        """Whether a text may be read where it stands."""
        last = where[-1] if where else ""
        if text in self.names:
            return True
        if set(OPTIONS) & {*where}:
            return words.is_name(text)
        if words.is_sentence(text, self.names):
            return True
        if last == "arguments":
            return words.is_command(text, self.names)
        if set(SENTENCES) & {*where}:
            return False
        if last == "hub":
            return bool(REPOSITORY.fullmatch(text))
        if last in ("file", "revision") or "texts" in where:
            return bool(IN_A_REPOSITORY.fullmatch(text)) and ".." not in text
        return words.is_name(text) or (last in DEVICES and words.is_device(text))


def is_place(key: str) -> bool:
    """Whether an option of this name holds a place or a secret."""
    return re.split(r"[_.-]", key.lower())[-1] in PLACES


def of_study(content: Mapping[str, Any]) -> Public:
    """What copies a results.json: the names that its author chose, or that Quantmill gave, are known."""
    config, rows = content["config"], content["rows"]
    names = {row[each] for row in rows for each in ("model", "format", "run", "engine") if row[each]}
    names |= {f"{row['format']}@{row['run']}" for row in rows if row["run"]}
    names |= {config["reference"], *config.get("variants", ()), *config.get("runs", ())}
    names |= {*config.get("tasks", {}).get("names", ())}
    return Public(frozenset(names))


def source(found: Mapping[str, Any]) -> dict[str, Any]:
    """Where weights came from: a repository of the hub with its commit, or the hashes alone."""
    return {key: value for key, value in found.items() if key != "path"}


def row(found: Mapping[str, Any], public: Public) -> dict[str, Any]:
    """A row of results.json."""
    kept = {name: value for name, value in found.items() if name in fields("row")}
    if kept["artifact"]:
        kept["artifact"] = kept["artifact"] | {"source": source(kept["artifact"]["source"])}
    said = "versions by its server" if "url" in found["options"] else "versions"
    versions = public.value(kept.pop("versions"), "rows", label(found), said)
    return public.value(kept, "rows", label(found)) | {"versions": versions}


def label(found: Mapping[str, Any]) -> str:
    """A row's name in the list of what is withheld."""
    return f"{found['format']}@{found['run']}" if found.get("run") else str(found["format"])


def fields(kind: str) -> Mapping[str, Any]:
    """The fields of a `row`, a `load` or a `task` of results.json."""
    return json.loads(SCHEMA.read_text(encoding="utf-8"))["$defs"][kind]["properties"]


def study(config: Mapping[str, Any], model: str, artifacts: Sequence[str], public: Public) -> dict[str, Any]:
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
    known = yaml.safe_load(CONFIG_SCHEMA.read_text(encoding="utf-8"))["properties"]
    kept = {key: value for key, value in config.items() if key in known and key not in left_out}
    changed = {"models": {model: {"source": origin}}, "formats": formats, "variants": variants, "runs": runs}
    return public.value(kept | changed | {"texts": texts}, "config")


def results(content: Mapping[str, Any], model: str, artifacts: Sequence[str], public: Public) -> dict[str, Any]:
    """results.json with the rows, loads and tasks of a model's artifacts alone, in the study's order."""

    def ours(name: str) -> list[Mapping[str, Any]]:
        return [each for each in content.get(name, ()) if each["model"] == model and each["format"] in artifacts]

    kept = {name: content[name] for name in TOP if name in content}
    changed: dict[str, Any] = {
        "units": public.value(content.get("units", {}), "units"),
        "config": study(content["config"], model, artifacts, public),
        "rows": [row(each, public) for each in ours("rows")],
    }
    for name, kind in (("loads", "load"), ("tasks", "task")):
        known = fields(kind)
        changed[name] = [
            public.value({key: value for key, value in each.items() if key in known}, name, label(each))
            for each in ours(name)
        ]
    return {name: value for name, value in (kept | changed).items() if value or name not in ("loads", "tasks")}


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
