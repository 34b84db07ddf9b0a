"""Checkpoint folders: one file or many shards, with an index that says which shard holds which tensor."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from checkpoint import safetensors_file, torch_zip
from checkpoint.tensor import Tensor
from common.program import UserError

INDEXES = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}
SINGLES = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}
READERS = {"safetensors": safetensors_file.read, "bin": torch_zip.read}
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder: `form` is `safetensors` or `bin`; `files` its weight files, in order.

    `weight_map` is the index's: tensor name -> file name; none where a single file has no index.
    """

    folder: Path
    form: str
    files: tuple[Path, ...]
    weight_map: dict[str, str] | None = None

    def config(self) -> dict:
        """config.json."""
        return read_json(self.folder / "config.json")

    def tensors(self) -> dict[str, Tensor]:
        """All tensors: name -> `Tensor`.

        Raises `UserError` where two shards hold the same name, or the index and the shards disagree: an engine would
        fill what is missing with random weights.
        """
        found: dict[str, Tensor] = {}
        for file in self.files:
            for name, tensor in READERS[self.form](file).items():
                if name in found:
                    raise UserError(f"{file}: {name} is also in {found[name].path.name}; only one of them can be meant")
                found[name] = tensor
        for name, file in (self.weight_map or {}).items():
            if name not in found or found[name].path.name != file:
                raise UserError(f"{self.folder / file}: lacks {name}, which the index says it holds; download it again")
        return found

    def others(self) -> list[Path]:
        """Config, tokenizer, generation and licence files: what holds no weights, is no manifest and not hidden."""
        skipped = ("quantmill.json", *WEIGHT_SUFFIXES)
        files = (path for path in sorted(self.folder.iterdir()) if path.is_file())
        return [path for path in files if not path.name.startswith(".") and not path.name.endswith(skipped)]


def read_json(path: Path) -> dict:
    """A JSON object of a model's folder. Raises `UserError` where it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; a model's folder holds it beside the weights") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no valid JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: should hold a JSON object; download it again")
    return content


def find(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, safetensors before .bin. Raises `UserError` where it is missing or incomplete."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    for form in ("safetensors", "bin"):
        index, single = folder / INDEXES[form], folder / SINGLES[form]
        if index.exists():
            weight_map = _weight_map(index)
            return Checkpoint(folder, form, _indexed_files(index, weight_map), weight_map)
        if single.exists():
            return Checkpoint(folder, form, (single,))
    raise UserError(f"{folder}: holds no weights; looked for {', '.join([*INDEXES.values(), *SINGLES.values()])}")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: has no weight_map; download it again")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{index}: its weight_map names something that is no file; download it again")
    return weight_map


def _indexed_files(index: Path, weight_map: dict[str, str]) -> tuple[Path, ...]:
    files = []
    for name in sorted(set(weight_map.values())):
        if name != Path(name).name or name in ("", ".", ".."):
            raise UserError(f"{index}: names the shard {name!r:.80}, which lies outside the model's folder; refused")
        if not (index.parent / name).is_file():
            raise UserError(f"{index.parent / name}: is missing, though {index.name} names it; download it again")
        files.append(index.parent / name)
    return tuple(files)


def safetensors_names(count: int) -> list[str]:
    """Names of so many safetensors shards, as transformers names them; a single file needs no index."""
    if count == 1:
        return [SINGLES["safetensors"]]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def bin_names(count: int) -> list[str]:
    """Names of so many .bin shards, as transformers names them; a single file needs no index."""
    if count == 1:
        return [SINGLES["bin"]]
    return [f"pytorch_model-{number:05d}-of-{count:05d}.bin" for number in range(1, count + 1)]


def index_json(shards: dict[str, Iterable[Tensor]], total_size: int) -> str:
    """The text of an index: shards maps a file's name to its tensors, total_size is the bytes of all of them."""
    weight_map = {tensor.name: file for file, tensors in shards.items() for tensor in tensors}
    return (
        json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    )
