"""What tasks ask `datasets.load_dataset` for: fetched once, at a recorded commit, and read from a folder ever after.

lm-evaluation-harness names a data set without a commit. So `load_dataset` is replaced while tasks are made: where data
is fetched by one that asks the hub for the commit first and keeps what came, elsewhere by one that reads what was kept.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, load_from_disk

from common import hub, manifest
from common.program import UserError, first_line

PACKAGED = ("json", "csv", "text", "parquet", "arrow")  # readers of files that data_files names
load_dataset = datasets.load_dataset
datasets.disable_progress_bars()  # a log is no place for them


def key(path: str, name: str | None, words: Mapping[str, Any]) -> str:
    """The folder of a data set: the same for the same question."""
    asked = json.dumps([path, name, words], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def local_files(data_files: Any) -> list[Path]:
    """The files that `data_files` names in any of its forms."""
    if isinstance(data_files, str):
        return [Path(data_files)]
    parts = data_files.values() if isinstance(data_files, Mapping) else data_files or ()
    return [file for part in parts for file in local_files(part)]


def describe(path: str, words: Mapping[str, Any]) -> dict[str, Any]:
    """Where a data set comes from: a repository at its commit, or files by their hashes. Raises `UserError` where it is
    not to be had, or is not kept anywhere by a name that stays."""
    if path not in PACKAGED and not Path(path).exists():
        repository = hub.resolve(path, words.get("revision") or "main", "dataset")
        return {"hub": path, "revision": words.get("revision") or "main", "commit": repository.commit}
    files = local_files(words.get("data_files"))
    for file in files:
        if ":/" in str(file):
            raise UserError(f"{file}: is an address, whose content no commit keeps; name a file, or another task")
        if not file.is_file():
            raise UserError(f"{file}: is not there; data_files are relative to the folder that Snakemake runs in")
    return {"path": path, "sha256": {str(file): manifest.sha256(file) for file in files}}


@contextmanager
def fetch_data(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Keep what is asked for meanwhile in `folder`; yields where each of it came from."""
    found: dict[str, dict[str, Any]] = {}

    def fetch(path: str, name: str | None = None, **words: Any) -> Any:
        words.pop("trust_remote_code", None)
        mine = key(path, name, words)
        if mine not in found:
            origin = describe(path, words)
            asked = words | ({"revision": origin["commit"]} if "commit" in origin else {})
            try:
                data = load_dataset(path, name, **asked)
            except Exception as error:  # whatever its readers raise
                raise UserError(f"{path}: datasets cannot load it ({first_line(error)})") from None
            if not isinstance(data, (Dataset, DatasetDict)):
                raise UserError(f"{path}: is streamed, so it cannot be kept; name another task")
            data.save_to_disk(folder / mine)
            found[mine] = {"folder": mine, "name": name, **origin}
        return load_from_disk(folder / mine)

    origins: list[dict[str, Any]] = []
    with answer_by(fetch):
        yield origins
    origins += found.values()


@contextmanager
def read_kept(folders: list[Path]) -> Iterator[None]:
    """Read what `fetch_data` kept in one of the folders."""

    def read(path: str, name: str | None = None, **words: Any) -> Any:
        words.pop("trust_remote_code", None)
        for folder in folders:
            if (folder / key(path, name, words)).exists():
                return load_from_disk(folder / key(path, name, words))
        raise UserError(f"{path}: is not among the documents of the tasks; remove their folders and run again")

    with answer_by(read):
        yield


@contextmanager
def answer_by(load: Callable[..., Any]) -> Iterator[None]:
    """Let everybody who asks the library for a data set ask `load`."""
    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = load_dataset
