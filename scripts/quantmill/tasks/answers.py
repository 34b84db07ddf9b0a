"""Answers of an engine in another process and environment (scripts/quantmill/tasks/worker.py).

Each answer is stored as it comes, so that an interrupted run can resume.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from quantmill.common.program import UserError, start_child

PATIENCE = 60  # seconds that an engine may take to close
AT_ONCE = 64  # entries that are sent together; the engine makes batches of them if it can
Entry = tuple[list[int], list[list[int]]]


class Answers:
    """Answers of the engine, or of the file with its earlier answers.

    Attributes:
        facts: the engine's `compute_type`, `versions`, `device`, `capabilities` and `ends`.
        asked: the number of requests that the engine got, without those that the file answered.
    """

    def __init__(self, process: subprocess.Popen, errors: IO[bytes], kept: Path, of: Mapping[str, Any]) -> None:
        """
        Args:
            errors: the file of the process' standard error.
            kept: the file of answers.
            of: what answers depend on besides the engine's facts. Answers of another artifact, library, device or code
                are discarded.
        """
        self.process, self.errors, self.kept, self.of, self.asked = process, errors, kept, of, 0
        self.known: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}

    def start(self) -> None:
        """Wait until the engine is ready, and read its earlier answers."""
        self.facts = self._hear()
        device = self.facts.get("device", {})
        words = {name: self.facts.get(name) for name in ("compute_type", "versions")}
        words["device"] = [device.get(name) for name in ("device", "name")]
        head = json.dumps({**self.of, **words}, sort_keys=True).encode() + b"\n"
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        lines = self.kept.read_bytes().splitlines(keepends=True) if self.kept.exists() else []
        whole = [head]
        for line in lines[1:] if lines[:1] == [head] else []:
            try:
                name, answer = json.loads(line)
            except ValueError:  # a run was killed, or the machine failed, while it was written
                break
            if line.endswith(b"\n"):
                self.known[name] = answer
                whole.append(line)
        if lines[:1] == [head]:
            os.truncate(self.kept, sum(map(len, whole)))
        else:
            self.kept.write_bytes(head)

    def _tell(self, content: Any) -> None:
        try:
            print(json.dumps(content), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            self._fail()

    def _hear(self) -> Any:
        line = next(iter(self.process.stdout or ()), "")
        return json.loads(line) if line.endswith("\n") else self._fail()

    def _fail(self) -> NoReturn:
        """Raise `UserError` with the last line of the process' standard error."""
        self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace")
        sys.stderr.write(said)
        lines = said.strip().splitlines() or ["it printed nothing"]
        raise UserError(f"the engine's process failed: {lines[-1].removeprefix('error: ')}")

    def _keep(self, name: str, answer: Any) -> None:
        self.known[name] = answer
        with self.kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, answer]) + "\n")

    def score(self, entries: Sequence[Entry]) -> Iterator[list[tuple[float, bool]]]:
        """Yield for each entry (ids, continuations) the sum of log-probabilities of each continuation, in nats, and
        whether it is greedy."""
        names = [digest("score", *entry) for entry in entries]
        waiting = [number for number, name in enumerate(names) if name not in self.known]
        place = 0
        for low in range(0, len(waiting), AT_ONCE):
            part = waiting[low : low + AT_ONCE]
            self._tell({"score": [entries[number] for number in part]})
            for number in part:
                self._keep(names[number], self._hear())
                self.asked += 1
                while place < len(names) and names[place] in self.known:
                    yield [tuple(each) for each in self.known[names[place]]]
                    place += 1
        for name in names[place:]:
            yield [tuple(each) for each in self.known[name]]

    def write(self, ids: list[int], tokens: int, ends: Callable[[list[int]], bool], until: Sequence[str]) -> list[int]:
        """Return at most `tokens` tokens after a prompt, up to the first for which `ends` is true, which depends on
        `until`."""
        name = digest("write", ids, tokens, until)
        if name not in self.known:
            written: list[int] = []
            self._tell({"write": ids, "tokens": tokens})
            while (token := self._hear()) is not None:
                written.append(token)
                self._tell(not ends(written))
            self._keep(name, written)
            self.asked += 1
        return self.known[name]


def digest(*question: Any) -> str:
    """Return the key of a question."""
    return hashlib.sha256(json.dumps(question).encode()).hexdigest()[:24]


@contextmanager
def ask(command: Sequence[Any], kept: Path, of: Mapping[str, Any]) -> Iterator[Answers]:
    """Start the engine's process for the time of the block."""
    with (
        tempfile.TemporaryFile() as errors,
        start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        yield Answers(process, errors, kept, of)
        with suppress(subprocess.TimeoutExpired):  # everything is answered; `start_child` then kills the process
            process.communicate(timeout=PATIENCE)
