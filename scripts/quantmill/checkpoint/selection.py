"""Select the files that make a model, in a folder or a repository of the hub, by a list of names, not of extensions.

A folder in which a model was trained also holds optimizers, other forms of the weights, notes and keys. Files that are
not listed are neither read, counted, copied into artifacts nor uploaded.
"""

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantmill.common import plain_file
from quantmill.common.program import UserError, printable

INDEXES = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}
SINGLES = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}
# such as model-00001-of-00002.safetensors; some repositories write model.safetensors-00001-of-00002.safetensors
SHARDS = {
    form: re.compile(rf"{Path(name).stem}(\{Path(name).suffix})?-\d+-of-\d+\{Path(name).suffix}")
    for form, name in SINGLES.items()
}
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")  # weights that peft adds to the model's
CONFIGS = ("config.json", "generation_config.json")
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "vocab.bpe", "merges.txt", "encoder.json", "bpe.codes", "tekken.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "spm.model"),
    *("ice_text.model", "chat_template.jinja", "chat_template.json"),
)
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")  # of images
TOKENIZER_PATTERN = re.compile(r"\w[\w.-]*\.tiktoken|tokenizer\.model\.v\d+", re.ASCII)
TERMS = re.compile(
    r"([a-z0-9]+[-_])?(licen[sc]e|copying|notice|readme|use_policy)([-_][a-z0-9]+(\.[0-9]+)*)*(\.(md|txt|rst))?",
    re.ASCII | re.IGNORECASE,
)
# further files of artifacts: weights, and configs and vocabularies of CTranslate2, MLC-LLM and auto-gptq
BUILT = re.compile(
    r"quantize_config\.json|model\.bin|vocabulary\.json|params_shard_\d+\.bin|mlc-chat-config\.json"
    r"|tensor-cache\.json|ndarray-cache\.json|\w[\w.-]*\.gguf",
    re.ASCII,
)
NAMED = 20  # of the files that are left out
MAX_BYTES = 64 * 2**20  # of a file that holds no weights; a tokenizer of 262,144 tokens has 33 MB


def is_tokenizer(name: str) -> bool:
    """Return whether a file of this name belongs to a tokenizer."""
    return name in TOKENIZER or bool(TOKENIZER_PATTERN.fullmatch(name))


def is_carried(name: str) -> bool:
    """Return whether a file of this name is copied along with its model: config, tokenizer, terms."""
    return name in (*CONFIGS, *PROCESSORS) or is_tokenizer(name) or bool(TERMS.fullmatch(name))


def is_artifacts(name: str) -> bool:
    """Return whether a file of this name is part of an artifact of any layout; nothing else is uploaded."""
    weights = name in (*SINGLES.values(), *INDEXES.values()) or any(each.fullmatch(name) for each in SHARDS.values())
    return weights or is_carried(name) or bool(BUILT.fullmatch(name))


def carried(folder: Path) -> list[Path]:
    """Return the files of a folder that `is_carried` names. Raises `UserError` if one is not a plain file, or too
    large."""
    found = [path for path in sorted(folder.iterdir()) if is_carried(path.name)]
    for path in found:
        plain_file.is_there(path)
        check_size(str(path), path.stat().st_size)
    return found


def check_size(what: str, size: int) -> None:
    """Raise `UserError` for a file without weights that is larger than any model's."""
    if size > MAX_BYTES:
        raise UserError(f"{what}: is {size / 1e9:.1f} GB, and such a file has {MAX_BYTES >> 20} MiB at most; remove it")


def parts(folder: Path) -> list[Path]:
    """Return the plain files of a folder that a model can be made of, with weights in any form."""
    weights = tuple(Path(name).suffix for name in SINGLES.values())
    wanted = (each for each in folder.iterdir() if is_carried(each.name) or each.name.endswith(weights))
    return [path for path in (*wanted, *(folder / name for name in INDEXES.values())) if path.is_file()]


def left_out(folder: Path, taken: Collection[str]) -> list[str]:
    """Return the names of a folder's other entries, folders with a slash, as a terminal can show them."""
    others = (each for each in folder.iterdir() if each.name not in taken)
    return sorted(f"{printable(each.name)}{'/' * each.is_dir()}" for each in others)


def report(place: str, left_out: Sequence[str]) -> dict[str, Any]:
    """Print what was left out, once, to standard error. Return it as parameters for a manifest, at most `NAMED`
    names."""
    if not left_out:
        return {}
    more = f" and {len(left_out) - NAMED} more" if left_out[NAMED:] else ""
    named = ", ".join(left_out[:NAMED])
    print(printable(f"{place}: not part of the model, so left out: {named}{more}"), file=sys.stderr)
    return {"left_out": list(left_out[:NAMED])}


def select(repository: str, files: Iterable[str]) -> list[str]:
    """Return the weights in one form, safetensors before .bin, and the files that belong to them, from the top level
    only.

    Raises `UserError` without weights or config.json, for an adapter next to them, and for a file that is too large.

    Args:
        files: names, or a mapping of names to objects with a `size` in bytes.
    """
    names = [name for name in sorted(files) if "/" not in name]
    if adapter := next((name for name in ADAPTERS if name in names), None):
        raise UserError(
            f"{repository}: holds {adapter}, an adapter; name a repository with the merged weights, or download the "
            "model and merge or remove it"
        )
    weights = _weights(names)
    if not weights or "config.json" not in names:
        missing = "config.json" if weights else "weights in safetensors or .bin"
        raise UserError(f"{repository}: holds no {missing}; name a repository with the model's original weights")
    kept = [name for name in names if is_carried(name)]
    sizes = files if isinstance(files, Mapping) else {}
    for name in kept:
        if name in sizes:
            check_size(f"{repository}/{name}", sizes[name].size)
    return [*weights, *kept]


def _weights(names: list[str]) -> list[str]:
    for form in ("safetensors", "bin"):
        if INDEXES[form] in names:
            return [INDEXES[form], *(name for name in names if SHARDS[form].fullmatch(name))]
        if SINGLES[form] in names:
            return [SINGLES[form]]
    return []
