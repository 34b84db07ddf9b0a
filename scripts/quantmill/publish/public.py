"""Copy results for publication: only fields and values of an allow-list.

Nothing here changes an artifact. A text is published only if it is made of known words
(scripts/quantmill/publish/words.py). Everything that is held back is listed for the user before anything is sent.
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
from quantmill.plan.config import TEXTS
from quantmill.plan.model_source import CHECKOUT
from quantmill.publish import words
from quantmill.report.labels import label

SCHEMA = PACKAGE / "report/results.schema.json"
CONFIG_SCHEMA = CHECKOUT / "config/config.schema.yaml"
WITHHELD = "not published"  # in place of a value
FAILED = "failed: the reason is not published"
TOP = ("schema_version", "metrics_version", "units", "config", "rows", "loads", "tasks")  # keys of results.json
OF_SERVERS = ("url", "authority", "token_variable")  # options of a run that tell where its server is
OF_MACHINES = ("interpreters", "llama_cpp", "publish", "loads")  # keys of a study that rebuild nothing
# last words of names of options whose values are places or secrets
PLACES = {"address", "cache", "dir", "directory", "endpoint", "file", "folder", "home", "host", "hostname", "key"}
PLACES |= {"password", "path", "proxy", "root", "secret", "server", "socket", "token", "url", "user", "username"}
OPTIONS = ("options", "parameters", "environment")  # free mappings, of the study's config or of a tool
# fields with texts of logs, devices and servers: each word has to be known
SENTENCES = {"missing", "warnings", "interference", "differs", "refused", "skipped", "notes", "unchecked", "reason"}
SENTENCES |= {"units", "versions by its server"}
DEVICES = ("device", "name")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\.(safetensors|bin|json|gguf|txt|model)", re.ASCII)
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
IN_A_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*", re.ASCII)  # a file, or a revision
PIECE = 2**20
CHECKPOINT = "checkpoint"  # name in a published study of a folder whose path is private


@dataclass
class Public:
    """Copies values that may be published.

    `names` are the study's models, formats, runs, engines and tasks. Each call adds to `withheld` what it held back.
    """

    names: frozenset[str] = frozenset()
    withheld: list[str] = field(default_factory=list)

    def value(self, found: Any, *where: str) -> Any:
        """Copy JSON: `WITHHELD` or `FAILED` replace texts that are not known to be harmless; such keys are left out.

        `where` are the keys that lead to the value.
        """
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
            elif set(OPTIONS) & {*where} and isinstance(each, str) and re.split(r"[_.-]", key.lower())[-1] in PLACES:
                self.withheld.append(f"{'.'.join((*where, key))}: {each!r:.100}")
                kept[key] = WITHHELD
            else:
                kept[key] = self.value(each, *where, key)
        return kept

    def is_key(self, key: str, where: tuple[str, ...]) -> bool:
        """Tell whether a key may be published: a field's name, a name of the study, or a file of the weights."""
        if key in self.names or ("sha256" in where[-1:] and FILE.fullmatch(key)):
            return True
        return words.is_name(key) or ("/" not in key and words.is_sentence(key, self.names))

    def is_harmless(self, text: str, where: tuple[str, ...]) -> bool:
        """Tell whether a text may be published at this place."""
        last = where[-1] if where else ""
        if text in self.names:
            return True
        if set(OPTIONS) & {*where}:
            return words.is_name(text)
        if words.is_sentence(text, self.names):
            return True
        if last == "arguments":
            return words.is_command(text, self.names)
        if SENTENCES & {*where}:
            return False
        if last == "hub":
            return bool(REPOSITORY.fullmatch(text))
        if last in ("file", "revision") or "texts" in where:
            return bool(IN_A_REPOSITORY.fullmatch(text)) and ".." not in text
        return words.is_name(text) or (last in DEVICES and words.is_device(text))


def of_study(content: Mapping[str, Any]) -> Public:
    """Return what copies a results.json. It knows the names that the study's author or Quantmill gave."""
    config, rows = content["config"], content["rows"]
    names = {row[each] for row in rows for each in ("model", "format", "run", "engine") if row[each]}
    names |= {f"{row['format']}@{row['run']}" for row in rows if row["run"]}
    names |= {config["reference"], *config.get("variants", ()), *config.get("runs", ())}
    names |= {*config.get("tasks", {}).get("names", ())}
    return Public(frozenset(names))


def source(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the origin of weights without a path: a hub repository with its commit, or only hashes."""
    return {key: value for key, value in found.items() if key != "path"}


def row(found: Mapping[str, Any], public: Public) -> dict[str, Any]:
    """Copy a row of results.json."""
    kept = {name: value for name, value in found.items() if name in fields("row")}
    if kept["artifact"]:
        kept["artifact"] = kept["artifact"] | {"source": source(kept["artifact"]["source"])}
    said = "versions by its server" if "url" in found["options"] else "versions"
    versions = public.value(kept.pop("versions"), "rows", label(found), said)
    return public.value(kept, "rows", label(found)) | {"versions": versions}


def fields(kind: str) -> Mapping[str, Any]:
    """Return the fields of a `row`, a `load` or a `task` of results.json."""
    return json.loads(SCHEMA.read_text(encoding="utf-8"))["$defs"][kind]["properties"]


def study(config: Mapping[str, Any], model: str, artifacts: Sequence[str], public: Public) -> dict[str, Any]:
    """Return a config that builds and measures one model's artifacts again.

    Tasks in files of the study's author are left out, because those files are not published.
    """
    wanted = list(dict.fromkeys([config["reference"], *artifacts]))
    variants = {name: words for name, words in config["variants"].items() if name in wanted}
    bases = (variants.get(name, {"format": name})["format"] for name in artifacts)
    # the reference has to be listed even if it is a variant
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
    """Return results.json with only the rows, loads and tasks of a model's artifacts, in the study's order."""

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
    """Raise `UserError` if a file holds a path of this machine or its user, or the token.

    What Quantmill writes holds none, but a checkpoint's other files may hold anything.
    """
    secrets = {str(place): "a path of this machine" for place in places()}
    if token := huggingface_hub.get_token():
        secrets[token] = "your token"
    for name, content in files.items():
        if secret := first_held(content, [each.encode() for each in secrets]):
            what = secrets[secret.decode()]
            raise UserError(f"{name}: holds {what}, which must stay private; remove it from the file and build again")


def places() -> list[Path]:
    """Return folders whose paths identify this machine. `/root` does not: any text may hold it."""
    folders = (Path.cwd(), CHECKOUT.resolve(), Path.home())
    return [folder for folder in dict.fromkeys(folders) if len(folder.parts) > 2]


def first_held(content: Path | bytes, needles: Sequence[bytes]) -> bytes | None:
    """Return the first needle that a file or bytes hold. A file is read in pieces that overlap."""
    overlap, end = max(map(len, needles), default=1), b""
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        while piece := file.read(PIECE):
            window = end + piece
            if found := next((needle for needle in needles if needle in window), None):
                return found
            end = window[-overlap:]
    return None
