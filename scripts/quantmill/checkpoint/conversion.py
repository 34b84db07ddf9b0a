"""Write a checkpoint's tensors as files of another form, and check what was written."""

import argparse
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from quantmill.checkpoint import EMBEDDINGS, HEAD, finite, portable, safetensors_file, sharding, shards, torch_zip
from quantmill.checkpoint.copying import equal_bytes
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import Tensor
from quantmill.common import manifest, program
from quantmill.common.atomic import clone_or_copy, fsync_path, share, write_atomically
from quantmill.common.program import UserError

WRITERS: dict[str, Callable[..., None]] = {"safetensors": safetensors_file.write, "bin": torch_zip.write}


def parser(doc: str) -> argparse.ArgumentParser:
    """Return the arguments of a program that converts a checkpoint's folder."""
    arguments = program.parser(doc)
    arguments.add_argument("src", type=Path, help="folder of the model")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument(
        "--verify",
        action="store_true",
        help="check the CRCs of the source, compare every byte that was written, hash it and flush it to the disk",
    )
    arguments.add_argument(
        "--share",
        action="store_true",
        help="SRC is an artifact of a workflow: check its files against its manifest, and share their bytes with DST",
    )
    size = "split the weights anew, e.g. 5GB; default: as they are"
    arguments.add_argument("--max-shard-size", type=sharding.parse_size, help=size)
    return arguments


def write_converted(
    source: Checkpoint,
    tensors: Mapping[str, Tensor],
    form: str,
    options: argparse.Namespace,
    *,
    tool: str,
    linked: bool = False,
    only_finite: bool = False,
    wrapper: str = "",
    left_out: Mapping[str, list[str]] | None = None,
) -> None:
    """Write a folder with tensors of a checkpoint in a form, and the checkpoint's other files as they are.

    Args:
        form: `safetensors` or `bin`; options: of `parser`; tool: the program's name for the manifest.
        linked: the weight files need no change, and are copied or shared.
        only_finite: refuse NaN and infinity; for safetensors.
        wrapper: the prefix that was removed from the tensors' names.
        left_out: tensors that the model does not use, as the manifest names them.
    """
    ordered = list(tensors.values())
    origin = manifest.read(options.src)["source"] if (options.src / manifest.NAME).exists() else {}
    limit = options.max_shard_size
    groups = sharding.split(ordered, limit) if limit else sharding.group_by_file(ordered)
    for group in groups:
        if len(group) > torch_zip.MAX_TENSORS_A_FILE and not linked:
            raise UserError(
                f"{options.src}: {len(group)} tensors would come into one file, and {torch_zip.MAX_TENSORS_A_FILE} is "
                "the most; split the weights with --max-shard-size"
            )
    read_here = {file.name for file in source.files} if linked and only_finite else set()
    recorded = manifest.read_checked(options.src, read_here) if options.share else {}
    with write_atomically(options.dst, source=options.src, sync=options.verify) as folder:
        folder.mkdir()
        if linked:
            for file in source.files:
                (share if options.share else clone_or_copy)(file, folder / file.name)
            sharding.place_index(source, ordered, folder)
            hashes: dict[str, str | None] = hash_files(groups, folder) if only_finite else {}
            if options.share:
                manifest.check(options.src, recorded, hashes)
        else:
            total = sum(tensor.nbytes for tensor in ordered)
            with tqdm(total=total, unit="B", unit_scale=True, desc=f"to {form}", disable=None) as bar:
                checks = {"verify": options.verify, "hash": options.verify, "only_finite": only_finite}
                hashes = convert(groups, folder, form, **checks, progress=bar.update)
        for path in source.others():
            if path.name == "config.json" and (config := portable.config(source.config())) != source.config():
                (folder / path.name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            else:
                clone_or_copy(path, folder / path.name)
        parameters = {"verify": options.verify, "max_shard_size": limit, "finite": only_finite}
        manifest.write(
            folder,
            format=form,
            tool="link" if linked else tool,
            tool_version=f"python {platform.python_version()}",
            parameters=parameters | ({"dropped_of_names": wrapper} if wrapper else {}),
            source=origin | dict(left_out or {}),
            parameter_count=sum(tensor.numel for tensor in ordered if tensor.is_weight),
            weight_files=[file.name for file in source.files] if linked else list(hashes),
            hashes=hashes,
        )


def convert(
    groups: Sequence[Sequence[Tensor]],
    folder: Path,
    form: str,
    *,
    verify: bool,
    hash: bool,
    only_finite: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, str | None]:
    """Write a file for each group of tensors, several at a time, and the index. Return the SHA-256 of each weight file.

    Args:
        form: `safetensors` or `bin`.
        verify: check the CRC of every member of zips among the sources, read back what was written, compare it byte by
            byte, and flush it to the disk.
        hash: compute the SHA-256; otherwise it is None.
        only_finite: refuse NaN and infinity; for safetensors.
        progress: called with the number of bytes just written.

    Raises `UserError` for a damaged source file or a weight that is not finite, and OSError if a written file differs
    from its source.
    """
    checks: dict[str, set[Path]] = {}  # each source file is checked with the first group that has tensors of it
    for tensors in groups:
        sources = {tensor.path for tensor in tensors if tensor.path.suffix == ".bin"}
        checks[tensors[0].name] = sources.difference(*checks.values())

    def write_file(path: Path, tensors: Sequence[Tensor]) -> str | None:
        for source in checks[tensors[0].name] if verify else ():
            torch_zip.check(source)
        WRITERS[form](path, tensors, progress=progress, **({"copy": finite.copy} if only_finite else {}))
        with ThreadPoolExecutor(1) as disk:
            flushed = disk.submit(fsync_path, path) if verify else None
            if verify:
                compare(tensors, path, form)
            digest = manifest.sha256(path) if hash else None
            if flushed:
                flushed.result()
        return digest

    return sharding.write(folder, form, groups, write_file)


def hash_files(groups: Sequence[Sequence[Tensor]], folder: Path) -> dict[str, str | None]:
    """Return the SHA-256 of each file of `folder`, a link to or a copy of the file of one group. Raises `UserError` for
    a weight that is NaN or infinite."""
    paths = [folder / tensors[0].path.name for tensors in groups]
    with ThreadPoolExecutor(manifest.HASHERS) as workers:
        return {path.name: found for path, found in zip(paths, workers.map(finite.sha256, paths, groups), strict=True)}


def compare(tensors: Sequence[Tensor], path: Path, form: str) -> None:
    """Read a written file. Raises OSError if its tensors or their bytes differ from the source's."""
    written = shards.READERS[form](path)
    wrong = {tensor.name for tensor in tensors} ^ set(written)
    wrong |= {
        tensor.name for tensor in tensors if tensor.name in written and not equal_bytes(tensor, written[tensor.name])
    }
    if wrong:
        raise OSError(f"{path}: {min(wrong)} was not written as it was read; check the disk and the memory")


def drop_tied(config: dict, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out an lm_head that the config ties to the embeddings, after checking that the checkpoint agrees.
    transformers 5 initialises a missing head at random if it is not tied, and silently unties heads that differ.
    Classes of a repository's own (`auto_map`) may not know the tie, so their heads stay."""
    head, embeddings = tensors.get(HEAD), tensors.get(EMBEDDINGS)
    tied = config.get("tie_word_embeddings")  # if absent, the model's class decides
    causal = "ForCausalLM" in str(config.get("architectures")) and "auto_map" not in config
    quantized = any(name.startswith("lm_head.") for name in tensors)  # EXL3's head has other names
    if tied is False and not quantized and embeddings is not None and causal:
        raise UserError(
            f"{embeddings.path.parent}: no lm_head.weight, and config.json does not tie it to the embeddings; "
            "set tie_word_embeddings to true if the model's author meant that, or download it again"
        )
    if tied is not True or head is None or embeddings is None:
        return tensors
    if replace(head, name="") != replace(embeddings, name="") and not equal_bytes(head, embeddings):
        raise UserError(
            f"{head.path}: lm_head.weight differs from the embeddings that config.json ties it to; "
            "set tie_word_embeddings to false, or download it again"
        )
    return {name: tensor for name, tensor in tensors.items() if name != head.name} if causal else tensors
