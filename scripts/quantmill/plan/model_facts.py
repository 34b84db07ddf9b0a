"""Facts of a model before its first job, from its config.json and the sizes of its files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from quantmill.checkpoint import model_shape, shards
from quantmill.checkpoint.model_shape import Shape
from quantmill.checkpoint.selection import select
from quantmill.checkpoint.tensor import DTYPE_BYTES
from quantmill.common.program import UserError
from quantmill.fetch import hub
from quantmill.layouts import published
from quantmill.plan.model_source import source

WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True)
class Origin:
    """A model's shape, bytes of its weights, and bytes to download. None is unknown; `why` gives the reason.

    `decoded`: the weights were published in low bits. `weight_bytes` are those of the decoded weights, `dtype` theirs.
    """

    shape: Shape | None
    weight_bytes: int | None
    form: str
    dtype: str
    download: int = 0
    why: str = ""
    decoded: bool = False


def dtype_of(config: dict[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype"))


def of_folder(folder: Path) -> Origin:
    """Return the facts of a local folder."""
    found = shards.find(folder)
    config = found.config()
    low_bits = published.read(found)
    nbytes = low_bits.nbytes if low_bits else sum(path.stat().st_size for path in found.files)
    shape = model_shape.of(config) or model_shape.of_weights(nbytes)
    return Origin(shape, nbytes, found.form, dtype_of(config), decoded=low_bits is not None)


def of_hub(name: str, revision: str) -> Origin:
    """Return the facts of a model of the hub, by its list of files and its config.json; from the cache if offline."""
    try:
        repository = hub.resolve(name, revision)
        files = select(name, repository.files)
        config = shards.read_json(hub.fetch(repository, ["config.json"])["config.json"])
        low_bits = published.scheme(name, config)
    except UserError as error:
        return Origin(None, None, "safetensors", "", why=str(error))
    cached = {
        file
        for file in files
        if isinstance(huggingface_hub.try_to_load_from_cache(name, file, revision=repository.commit), str)
    }
    weights = [file for file in files if file.endswith(WEIGHTS)]
    nbytes = sum(repository.files[file].size for file in weights)
    shape = model_shape.of(config)
    if low_bits:  # without headers, and for a model without sizes as if it had 4 bits a weight
        nbytes = DTYPE_BYTES[published.DTYPES[published.dtype(config)]] * (shape.parameters if shape else 2 * nbytes)
    return Origin(
        shape or model_shape.of_weights(nbytes),
        nbytes,
        "bin" if weights[0].endswith(".bin") else "safetensors",
        dtype_of(config),
        sum(repository.files[file].size for file in files if file not in cached),
        decoded=low_bits is not None,
    )


def origin(model: dict[str, Any], folder: Path) -> Origin:
    """Return the facts of a model: of its source in artifacts/, else of its origin."""
    kind, path = source(model)
    if (folder / "source/config.json").is_file():
        return of_folder(folder / "source")
    if kind == "hub":
        return of_hub(str(path), model["source"].get("revision", "main"))
    if kind == "random":
        found = model_shape.of(shards.read_json(path / "config.json" if path.is_dir() else path))
        why = "" if found else f"{path} has no sizes of a decoder"
        return Origin(found, 2 * found.parameters if found else None, "safetensors", "float16", why=why)
    return of_folder(path)
