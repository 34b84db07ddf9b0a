"""The data sets of tasks: fetched once, at a recorded commit, and read from a folder afterwards.

lm-evaluation-harness names a data set without a commit. So `datasets.load_dataset` is replaced while tasks are made. In
the program that fetches, the replacement asks the hub for the commit and stores the data; elsewhere it reads that.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, load_from_disk
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

from quantmill.common import manifest
from quantmill.common.program import UserError, first_line
from quantmill.fetch import hub

PACKAGED = ("json", "csv", "text", "parquet", "arrow")  # readers of files that data_files names
REPOSITORY = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)  # a data set's name on the hub
FILES = ("data_files", "data_dir")
# Allowed arguments of load_dataset. Others write elsewhere (cache_dir), send a token, or start processes
WORDS = set(FILES) | {"column_names", "delimiter", "features", "field", "header", "revision", "sep", "split"}
WORDS |= {"streaming", "verification_mode"}
WILD = re.compile(r"[*?\[\]{}]")  # of a pattern, which matches more files than are hashed
load_dataset = datasets.load_dataset
datasets.disable_progress_bars()  # they do not belong in a log


def key(path: str, name: str | None, words: Mapping[str, Any]) -> str:
    """Return the folder name of a data set, which depends on the arguments alone."""
    asked = json.dumps([path, name, words], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def local_files(data_files: Any) -> list[Path]:
    """Return the files that `data_files` names, in any form. Raises `UserError` for anything else."""
    if isinstance(data_files, str):
        return [Path(data_files)]
    parts = data_files.values() if isinstance(data_files, Mapping) else data_files
    if not isinstance(parts, Iterable):
        raise UserError(f"data_files: {data_files!r:.60} names no files; give one, a list, or one for each split")
    return [file for part in parts for file in local_files(part)]


def check_question(path: str, name: str | None, words: Mapping[str, Any]) -> None:
    """Check the arguments of `load_dataset`: a repository of the hub and its own files, or files of the folder that
    Snakemake runs in. Raises `UserError` for anything else."""
    if not isinstance(path, str) or not (name is None or isinstance(name, str)):
        raise UserError(f"dataset_path: {path!r:.60} with {name!r:.60} is not a data set's name; correct it")
    if strange := sorted(words.keys() - WORDS):
        raise UserError(f"{path}: dataset_kwargs.{strange[0]} is not passed on; use {', '.join(sorted(WORDS))}")
    if path in PACKAGED:
        if words.get("data_dir") is not None or not words.get("data_files"):
            raise UserError(f"{path}: wants data_files, which names each file; correct dataset_kwargs")
        for file in local_files(words["data_files"]):
            check_file(file)
        return
    if path in _PACKAGED_DATASETS_MODULES or Path(path).exists() or not REPOSITORY.fullmatch(path):
        raise UserError(
            f"{path}: is not a data set of the hub; for files of yours, dataset_path is one of {', '.join(PACKAGED)} "
            "and data_files names them"
        )
    for file in local_files([words[name] for name in FILES if words.get(name) is not None]):
        if ":" in str(file) or file.is_absolute() or ".." in file.parts or str(file).startswith("~"):
            raise UserError(f"{path}: {file} is not a file of that repository; name one by its path in it")


def check_file(file: Path) -> None:
    """Raise `UserError` if a data file of the user is not a plain file in the folder that Snakemake runs in."""
    if ":" in str(file):
        raise UserError(f"{file}: is an address, whose content may change; name a file, or another task")
    if WILD.search(str(file)):
        raise UserError(f"{file}: is a pattern; data_files names each file")
    if file.is_absolute() or not file.resolve().is_relative_to(Path.cwd().resolve()):
        raise UserError(
            f"{file}: is outside of the folder that Snakemake runs in; copy it there and use a relative path"
        )
    if not file.is_file():
        raise UserError(f"{file}: is not there; data_files are relative to the folder that Snakemake runs in")


def describe(path: str, words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the origin of a data set: a repository at its commit, or files with their hashes. Raises `UserError` if it
    is not available."""
    if path not in PACKAGED:
        repository = hub.resolve(path, words.get("revision") or "main", "dataset")
        return {"hub": path, "revision": words.get("revision") or "main", "commit": repository.commit}
    files = local_files(words.get("data_files"))
    return {"path": path, "sha256": {str(file): manifest.sha256(file) for file in files}}


@contextmanager
def fetch_data(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Store the data sets of the block in `folder`; yield the list of their origins."""
    origins: list[dict[str, Any]] = []

    def fetch(path: str, name: str | None = None, **words: Any) -> Any:
        words.pop("trust_remote_code", None)
        check_question(path, name, words)
        mine = key(path, name, words)
        if not (folder / mine).exists():
            origin = describe(path, words)
            asked = words | ({"revision": origin["commit"]} if "commit" in origin else {})
            try:
                data = load_dataset(path, name, **asked)
            except Exception as error:  # whatever its readers raise
                raise UserError(f"{path}: datasets cannot load it ({first_line(error)})") from None
            if not isinstance(data, (Dataset, DatasetDict)):
                raise UserError(f"{path}: is streamed, so it cannot be stored; name another task")
            data.save_to_disk(folder / mine)
            origins.append({"folder": mine, "name": name, **origin})
        return load_from_disk(folder / mine)

    with answer_by(fetch):
        yield origins


@contextmanager
def read_kept(folders: list[Path]) -> Iterator[None]:
    """Read data sets that `fetch_data` stored in one of the folders."""

    def read(path: str, name: str | None = None, **words: Any) -> Any:
        words.pop("trust_remote_code", None)
        for kept in (folder / key(path, name, words) for folder in folders):
            if kept.exists():
                return load_from_disk(kept)
        raise UserError(f"{path}: is not among the documents of the tasks; remove their folders and run again")

    with answer_by(read):
        yield


@contextmanager
def answer_by(load: Callable[..., Any]) -> Iterator[None]:
    """Replace the library's `load_dataset` in the block."""
    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = load_dataset
