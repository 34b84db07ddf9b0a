"""A column of results.csv, and the functions that compute figures which no result file holds as they are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

UNITS = {"ms": "ms", "s": "s", "J": "J", "nat": "nats", "nat/token": "nats a token"}  # shown in headings


def set_later(*parts: Any) -> None:
    """Source of a figure that depends on other rows or on the study: it is set when all rows are there."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of a row.

    kind: its JSON type; an array is of strings. text: a sentence that describes it.
    parts: what `source` takes, of `cell` (an entry of study.json), `artifact` (its manifest), `latency`, `quality` and
        `noise_floor` (result files). If one is missing, so is the figure, for the same reason. Without a source, it is
        the figure of the part's summary that has the column's name.
    why_missing: why it may be empty though its parts are there; a figure of the cell without it is never empty.
    better: the direction of an improvement. limits: further keywords of JSON Schema.
    shown: its place among the columns that the page and the READMEs show at once; None for one that a click shows.
    judge: how report.compare tells a change from chance, a key of comparison.JUDGES; None if it is not compared.
    """

    name: str
    kind: Literal["string", "integer", "number", "boolean", "array"]
    text: str
    parts: tuple[str, ...]
    source: Callable[..., Any] | None = None
    why_missing: str = ""
    unit: str = ""
    title: str = ""
    better: Literal["higher", "lower"] | None = None
    shown: int | None = None
    judge: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        """The title, with its unit."""
        title = self.title or self.name.replace("_", " ")
        return f"{title}, {UNITS[self.unit]}" if self.unit in UNITS else title

    def value(self, found: Mapping[str, Any]) -> Any:
        """Return the figure of a row from its parts by name."""
        if self.source:
            return self.source(*(found[part] for part in self.parts))
        return found[self.parts[0]]["summary"].get(self.name)

    def schema(self) -> dict[str, Any]:
        """Return the column's JSON Schema."""
        nullable = self.parts != ("cell",) or self.why_missing
        items = {"items": {"type": "string"}} if self.kind == "array" else {}
        unit = {"unit": self.unit} if self.unit else {}
        type_ = [self.kind, "null"] if nullable else self.kind
        return {"type": type_, **unit, "description": self.text, **self.limits, **items}


def of_cell(name: str, text: str, source: Callable[..., Any], **more: Any) -> Column:
    """Describe a name that the study gives."""
    return Column(name=name, kind="string", text=text, parts=("cell",), source=source, **more)


def of_artifact(name: str, kind: Any, text: str, source: Callable[..., Any], **more: Any) -> Column:
    """Describe a figure of the manifest."""
    return Column(name=name, kind=kind, text=text, parts=("artifact",), source=source, **more)


def of_speed(name: str, text: str, kind: Any = "number", **more: Any) -> Column:
    """Describe a figure of the latency result."""
    more = {"why_missing": "the engine or the device does not report it", "limits": {"minimum": 0}} | more
    return Column(name=name, kind=kind, text=text, parts=("latency",), **more)


def of_quality(name: str, text: str, kind: Any = "number", **more: Any) -> Column:
    """Describe a figure of the quality result."""
    more = {"why_missing": "the engine does not report what it follows from"} | more
    return Column(name=name, kind=kind, text=text, parts=("quality",), **more)


def ends(of: Callable[..., Column], name: str, text: str, title: str = "", **more: Any) -> list[Column]:
    """Describe both ends of a figure's interval; `text` completes "Lower end of"."""
    texts = {"low": f"Lower end of {text}", "high": "Upper end of the same interval."}
    return [of(f"{name}_{end}", said, title=title and f"{title}, {end}", **more) for end, said in texts.items()]


def group_size(artifact: Mapping[str, Any]) -> int | None:
    """Return how many weights share a scale, by GPTQ's or AWQ's parameters; None of formats without that choice."""
    parameters = artifact.get("parameters") or {}
    return parameters.get("group_size", parameters.get("q_group_size"))


def device(speed: Mapping[str, Any]) -> str:
    """Return the device's name, with their number if there are several."""
    gpus = speed.get("gpus", 1)
    return f"{gpus} x {speed['device']['name']}" if gpus > 1 else speed["device"]["name"]


def limits(length: int | list[int]) -> list[int]:
    """Return a length of the config as a list: a number, or the least and the most."""
    return length if isinstance(length, list) else [length]


def above_noise_floor(loss: Mapping[str, Any], noise: Mapping[str, Any]) -> bool | None:
    """Return whether the divergence exceeds the noise floor's, over the few windows on which that was measured."""
    windows, count = loss["windows"], len(noise["windows"]["kld"])
    if not windows.get("kld"):
        return None
    return sum(windows["kld"][:count]) / sum(windows["tokens"][:count]) > noise["summary"]["kld_mean"]


NOT_NEGATIVE, POSITIVE = {"minimum": 0}, {"exclusiveMinimum": 0}
SHARE = {"minimum": 0, "maximum": 1}
