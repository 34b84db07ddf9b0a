"""Answers of an engine that runs in a process and an environment of its own (scripts/quantmill/tasks/worker.py), each
kept as it comes: a run that was ended goes on where it was.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from quantmill.common.program import UserError, start_child

PATIENCE = 60  # seconds that an engine may take to close
AT_ONCE = 64  # entries that are sent at a time; the engine makes batches of them as it can
Entry = tuple[list[int], list[list[int]]]


class Answers:
    """Asks the engine, or the file of what it has answered already.

    Attributes:
        facts: what the engine says of itself: `compute_type`, `versions`, `device`, `capabilities`, `ends`.
        asked: how many requests it was really asked, and not the file.
    """

    def __init__(self, process: subprocess.Popen, errors: IO[bytes], kept: Path, of: Mapping[str, Any]) -> None:
        """`kept`: the file; `of`: what answers depend on, beside what the engine says of itself. Those of another
        artifact, library or device, or of other code, are not ours."""
        self.process, self.errors, self.kept, self.of, self.asked = process, errors, kept, of, 0
        self.known: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.file: BinaryIO | None = None

    def start(self) -> None:
        """Wait until the engine is ready, and read what it has answered already."""
        self.facts = self._hear()
        device = self.facts.get("device", {})
        words = {name: self.facts.get(name) for name in ("compute_type", "versions")}
        words["device"] = [device.get(name) for name in ("device", "name")]
        head = json.dumps({**self.of, **words}, sort_keys=True).encode() + b"\n"
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        self.kept.touch()
        self.file = self.kept.open("r+b")
        if self.file.readline() != head:
            self.file.seek(0)
            self.file.truncate()
            self.file.write(head)
            return
        whole = self.file.tell()
        for line in self.file:
            try:
                name, answer = json.loads(line)
            except ValueError:  # it was being written when a run was killed, or the machine failed
                break
            if line.endswith(b"\n"):
                self.known[name] = answer
                whole += len(line)
        self.file.seek(whole)
        self.file.truncate()

    def close(self) -> None:
        """Close the file; what it holds stays."""
        if self.file:
            self.file.close()

    def _tell(self, content: Any) -> None:
        try:
            self.process.stdin.write(json.dumps(content) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _hear(self) -> Any:
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else self._fail()

    def _fail(self) -> None:
        """Raises `UserError` with the last line of what the engine's process said."""
        self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace")
        sys.stderr.write(said)
        lines = said.strip().splitlines() or ["it said nothing"]
        raise UserError(f"the engine's process failed: {lines[-1].removeprefix('error: ')}")

    def _keep(self, name: str, answer: Any) -> None:
        self.known[name] = answer
        assert self.file
        self.file.write(json.dumps([name, answer]).encode() + b"\n")
        self.file.flush()

    def score(self, entries: Sequence[Entry]) -> Iterator[list[tuple[float, bool]]]:
        """Yield for each entry (ids, continuations) their sums of log-probabilities, in nats, and whether they are
        greedy."""
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
        """At most so many tokens after a prompt, up to the one after which `ends` is true; it depends on `until`."""
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
    """The name of a question."""
    return hashlib.sha256(json.dumps(question).encode()).hexdigest()[:24]


@contextmanager
def ask(command: Sequence[Any], kept: Path, of: Mapping[str, Any]) -> Iterator[Answers]:
    """Start what answers, for as long as the block lasts."""
    with (
        tempfile.TemporaryFile() as errors,
        start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        with closing(Answers(process, errors, kept, of)) as answers:
            yield answers
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # all was answered; what does not end by itself is ended
            process.wait(PATIENCE)
