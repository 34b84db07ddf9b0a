"""The page while jobs still run: made again whenever a row becomes whole. It disturbs no measurement, which waits."""

import json
import logging
import os
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from snakemake.logging import logger
from snakemake_interface_logger_plugins.common import LogEvent

from quantmill.common import surroundings
from quantmill.common.program import start_child

ALONE = ("latency", "loads", "page")  # rules whose jobs wait until the page is made
PATIENCE = 120  # seconds that such a job waits at most
PARTS = ("artifact", "latency", "quality")  # what a row is made of


class LivePage(logging.Handler):
    """Hears from Snakemake which jobs start and end; while it handles a record, no job starts."""

    def __init__(
        self,
        command: Sequence[Any],
        ready: Callable[[], bool],
        rows: Sequence[Mapping[str, Any]],
        pending: Collection[str],
        log: Path,
    ) -> None:
        """
        Args:
            command: makes the page; it reads the files that are still to be made, a JSON list, from standard input.
            ready: whether it can be run already.
            rows: study.json's cells. pending: files that this run is to make.
            log: where the errors of `command` go.
        """
        super().__init__()
        self.command, self.ready, self.rows, self.log = command, ready, rows, log
        self.pending = set(pending)
        self.outputs: dict[int, list[str]] = {}  # of the jobs that have started
        self.shown = self._whole()
        self.child: subprocess.Popen | None = None
        self.children = ExitStack()

    def _whole(self) -> int:
        """How many rows have all that they are made of."""
        return sum(self.pending.isdisjoint(row[part] for part in PARTS) for row in self.rows)

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if event == LogEvent.JOB_INFO:
            self.outputs[record.jobid] = list(record.output)
            if record.rule_name in ALONE:
                self.wait()
        elif event in (LogEvent.JOB_FINISHED, LogEvent.JOB_ERROR):
            number = record.job_id if event == LogEvent.JOB_FINISHED else record.jobid
            self.pending.difference_update(self.outputs.get(number, ()))
            if event == LogEvent.JOB_FINISHED:
                self.make()

    def make(self) -> None:
        """Start to make the page where it would show more rows; the last row is the page's own job's to show."""
        busy = self.child is not None and self.child.poll() is None
        whole = self._whole()
        if busy or not self.shown < whole < len(self.rows) or not self.ready():
            return
        self.wait()
        try:
            with self.log.open("w") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": log, "text": True}
                self.child = self.children.enter_context(
                    start_child(self.command, surroundings.clear(os.environ), **pipes)
                )
            with self.child.stdin as stdin:
                json.dump(sorted(self.pending), stdin)
        except OSError as error:
            logger.warning("The page of the first rows was not made: %s", error)
            return
        self.shown = whole

    def wait(self) -> None:
        """Wait for the page that is being made."""
        if self.child is not None:
            try:
                self.child.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.child.kill()
            self.children.close()
            self.child = None

    def close(self) -> None:
        self.wait()
        super().close()
