"""Read checkpoint folders: one file, or many shards with an index of the shard of each tensor."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantmill.checkpoint import TABLES, reads_more_than_text, safetensors_file, share_read, torch_zip
from quantmill.checkpoint.selection import ADAPTERS, INDEXES, SHARDS, SINGLES, carried
from quantmill.checkpoint.tensor import MAX_NAME, Tensor, refuse_pointer
from quantmill.common import bounded_json, plain_file
from quantmill.common.model_config import MAX_CONFIG, of_text
from quantmill.common.program import UserError

MAX_LEVELS = 100  # of nesting in a config.json
MAX_TENSORS = 200_000  # of a model; the largest have 90,000
READERS = {"safetensors": safetensors_file.read, "bin": torch_zip.read}
HEADS = (".lm_head.", ".embed_out.")  # parts of names of a head's tensors; the second is GPT-NeoX's


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder: `form` is `safetensors` or `bin`; `files` are its weight files, in order. `weight_map` is the
    index's: tensor name -> file name; None for a single file without an index."""

    folder: Path
    form: str
    files: tuple[Path, ...]
    weight_map: dict[str, str] | None = None

    def config(self) -> dict:
        """Read config.json. Raises `UserError` as `read_config` does."""
        return read_config(self.folder / "config.json")

    def tensors(self) -> dict[str, Tensor]:
        """Find all tensors: name -> `Tensor`. Raises `UserError` if two shards hold the same name, or the index and the
        shards disagree: an engine would initialise missing tensors at random."""
        found: dict[str, Tensor] = {}
        for file in self.files:
            for name, tensor in READERS[self.form](file).items():
                if len(found) == MAX_TENSORS:
                    raise UserError(f"{file}: goes beyond {MAX_TENSORS} tensors, which no model has; refused")
                if name in found:
                    raise UserError(f"{file}: {name} is also in {found[name].path.name}; only one of them can be right")
                found[name] = tensor
        if not found:
            raise UserError(f"{self.files[0]}: holds no tensors; download it again")
        for name, part in (self.weight_map or {}).items():
            if name not in found or found[name].path.name != part:
                raise UserError(f"{self.folder / part}: lacks {name}, which the index says it holds; download it again")
        return found

    def others(self) -> list[Path]:
        """Return the folder's other files that make the model: config, tokenizer and terms (see
        checkpoint.selection)."""
        return [check_inside(self.folder, path) for path in carried(self.folder)]

    def index(self) -> Path | None:
        """Return the index's file; None if there is none."""
        return self.folder / INDEXES[self.form] if self.weight_map is not None else None


def read_config(path: Path) -> dict:
    """Read a model's config.json. Raises `UserError` as `read_json` does, for nesting too deep for programs that
    recurse, and for an `attribute_map`: transformers renames keys by it, so a library would see other keys than were
    checked."""
    config = read_json(path)
    level: list[Any] = [config]
    for _ in range(MAX_LEVELS):
        if any(isinstance(each, dict) and "attribute_map" in each for each in level):
            raise UserError(f"{path}: has an attribute_map, which gives keys other names; remove it")
        parts = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for part in parts for each in part]
        if not level:
            return config
    raise UserError(f"{path}: is nested more than {MAX_LEVELS} deep, which no model's is; refused")


def read_json(path: Path, limit: int = MAX_CONFIG, values: int = bounded_json.MAX_VALUES) -> dict:
    """Read a JSON object of a model's folder. Raises `UserError` if it is missing, damaged or over `limit` bytes."""
    content = _read(path, limit, values)
    if not isinstance(content, dict):
        raise UserError(f"{path}: should hold a JSON object; download it again")
    return content


def read_list(path: Path, limit: int) -> list[Any]:
    """Read a JSON array of a model's folder. Raises `UserError` as `read_json` does."""
    content = _read(path, limit, bounded_json.MAX_VALUES)
    if not isinstance(content, list):
        raise UserError(f"{path}: should hold a JSON array; download it again")
    return content


def _read(path: Path, limit: int, values: int) -> Any:
    if not plain_file.is_there(path):
        raise UserError(f"{path} is missing; a model's folder holds it next to the weights")
    refuse_pointer(path)
    try:
        return bounded_json.loads(plain_file.read(path, limit), limit, values)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error!s:.120}); download it again") from None


def find(folder: Path, only: Collection[str] | None = None) -> Checkpoint:
    """Find the checkpoint in a folder, safetensors before .bin. Raises `UserError` if it is missing or incomplete, if
    files lie outside the folder, for a shard that the index does not name, and for an adapter next to the weights,
    since either could be meant.

    Args:
        only: names of files; others in the folder are not looked at. None: all are.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    for name in ADAPTERS:
        if (folder / name).exists():
            raise UserError(
                f"{folder / name}: is an adapter next to a model; merge it into the model's weights (merge_and_unload "
                "of peft), or remove it to have the model without it"
            )
    for form in ("safetensors", "bin"):
        index, single = folder / INDEXES[form], folder / SINGLES[form]
        if plain_file.is_there(index):
            weight_map = _weight_map(check_inside(folder, index))
            found = Checkpoint(folder, form, _indexed_files(index, form, weight_map), weight_map)
        elif plain_file.is_there(single):
            found = Checkpoint(folder, form, (check_inside(folder, single),))
        else:
            continue
        for path in sorted(folder.iterdir()):
            if only is not None and path.name not in only:
                continue
            if (path == single or SHARDS[form].fullmatch(path.name)) and path not in found.files:
                reason = f"{index.name} does not name it" if index.is_file() else f"there is {single.name} too"
                raise UserError(f"{path}: holds weights, but {reason}; remove the one that is not the model's")
        return found
    lone = next((path for form in SHARDS for path in folder.iterdir() if SHARDS[form].fullmatch(path.name)), None)
    if lone:
        raise UserError(f"{lone}: a shard, but its index is not there; download {' or '.join(INDEXES.values())} too")
    raise UserError(f"{folder}: holds no weights; looked for {', '.join([*INDEXES.values(), *SINGLES.values()])}")


def bytes_read(sizes: Mapping[str, int], config: Mapping[str, Any]) -> int:
    """Return the bytes that decoding one token reads of tensors of these sizes in bytes: of experts those that it is
    routed to, and of an embedding table next to a head one row, which is not counted."""
    left_out = TABLES if any(head in f".{name}" for name in sizes for head in HEADS) else ()
    read = {name: size for name, size in sizes.items() if not name.endswith(left_out)}
    return sum(round(size * share_read(name, config)) for name, size in read.items())


def bytes_per_token(folder: Path) -> int:
    """Return `bytes_read` of a folder's safetensors."""
    tensors = [item for file in sorted(folder.glob("*.safetensors")) for item in safetensors_file.read(file).items()]
    return bytes_read({name: tensor.nbytes for name, tensor in tensors}, of_text(read_json(folder / "config.json")))


def bytes_held(folder: Path, value_bytes: int) -> int:
    """Return the bytes that a folder's safetensors take where they are loaded as float numbers of `value_bytes`. A
    quantized model's are loaded as they are stored."""
    tensors = [each for file in sorted(folder.glob("*.safetensors")) for each in safetensors_file.read(file).values()]
    stored = "quantization_config" in read_config(folder / "config.json")
    return sum(each.nbytes if stored or "F" not in each.dtype else each.numel * value_bytes for each in tensors)


def text_parameters(folder: Path) -> int:
    """Return the number of weights of a folder's language model, which is all that some formats hold."""
    tensors = find(folder).tensors().values()
    return sum(tensor.numel for tensor in tensors if tensor.is_weight and not reads_more_than_text(tensor.name))


def check_inside(folder: Path, path: Path) -> Path:
    """Return the same path. Raises `UserError` for a link that leads out of the model's folder. A hub's cache may link
    to its own blobs."""
    root = folder.resolve()
    roots = [root]
    if root.parent.name == "snapshots" and root.parents[1].name.startswith("models--"):
        roots = [root.parents[1], root.parents[2] / "blobs"]
    if not any(path.resolve().is_relative_to(each) for each in roots):
        raise UserError(f"{path}: is a link that leads out of the model's folder; refused. Put the file itself there")
    return path


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, bounded_json.MAX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: has no weight_map; download it again")
    if len(weight_map) > MAX_TENSORS:
        raise UserError(f"{index}: names more than {MAX_TENSORS} tensors, which no model has; refused")
    for name, file in weight_map.items():
        if len(name) > MAX_NAME or not isinstance(file, str) or len(file) > MAX_NAME:
            raise UserError(f"{index}: its weight_map has an impossible entry {name!r:.60}; download it again")
    return weight_map


def _indexed_files(index: Path, form: str, weight_map: dict[str, str]) -> tuple[Path, ...]:
    files = []
    for name in sorted(set(weight_map.values())):
        if name != Path(name).name or name in ("", ".", ".."):
            raise UserError(f"{index}: names the shard {name!r:.80}, which lies outside the model's folder; refused")
        suffix = Path(SINGLES[form]).suffix
        if not name.endswith(suffix) or name.startswith("."):
            raise UserError(f"{index}: names the shard {name!r:.80}, which is not a {suffix} file; refused")
        if not plain_file.is_there(index.parent / name):
            raise UserError(f"{index.parent / name}: is missing, though {index.name} names it; download it again")
        files.append(check_inside(index.parent, index.parent / name))
    return tuple(files)
