"""Which of a repository's files make a model, so that nothing is fetched twice and nothing that nobody reads."""

from collections.abc import Iterable

from checkpoint.shards import ADAPTERS, INDEXES, SHARDS, SINGLES
from common.program import UserError
from common.publish import MANIFEST

KEPT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # config, generation and tokenizer files
OURS = ("results.json", MANIFEST)  # what scripts/push.py leaves beside an artifact
KEPT_NAMES = ("LICENSE", "LICENCE", "NOTICE", "README", "USE_POLICY")


def select(repository: str, names: Iterable[str]) -> list[str]:
    """The weights in one form, safetensors before .bin, and what belongs to them; only what lies at the top.

    Raises `UserError` where there are no weights or no config.json, or an adapter beside them.
    """
    names = [name for name in sorted(names) if "/" not in name]
    if adapter := next((name for name in ADAPTERS if name in names), None):
        raise UserError(
            f"{repository}: holds {adapter}, an adapter; name a repository with the merged weights, or download the "
            "model and merge or remove it"
        )
    weights = _weights(names)
    if not weights or "config.json" not in names:
        missing = "config.json" if weights else "weights in safetensors or .bin"
        raise UserError(f"{repository}: holds no {missing}; name a repository with the model's original weights")
    wanted = [name for name in names if name.endswith(KEPT_SUFFIXES) or name.startswith(KEPT_NAMES)]
    kept = [name for name in wanted if not name.endswith((".index.json", *OURS)) and name[0] != "."]
    return [*weights, *kept]


def _weights(names: list[str]) -> list[str]:
    for form in ("safetensors", "bin"):
        if INDEXES[form] in names:
            return [INDEXES[form], *(name for name in names if SHARDS[form].fullmatch(name))]
        if SINGLES[form] in names:
            return [SINGLES[form]]
    return []
