"""The page while jobs still run: made again whenever a row becomes complete. Measurements wait until it is made."""

import json
import logging
import os
import subprocess
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from snakemake.logging import logger
from snakemake_interface_logger_plugins.common import LogEvent

from quantmill.common import surroundings
from quantmill.common.program import start_child
from quantmill.report.rows import Cell, value_of

ALONE = ("latency", "loads", "page")  # rules whose jobs wait until the page is made
PATIENCE = 120  # seconds that such a job waits, at most
PARTS = ("artifact", "latency", "quality")  # of a row


class LivePage(logging.Handler):
    """Handler of Snakemake's records of jobs that start and end; while it handles one, no job starts."""

    def __init__(
        self,
        command: Sequence[Any],
        ready: Callable[[], bool],
        rows: Sequence[Cell],
        pending: Collection[str],
        log: Path,
    ) -> None:
        """
        Args:
            command: makes the page; it reads a JSON list of the files still to be made from standard input.
            ready: returns whether it can be run already.
            rows: study.json's cells. pending: files that this run is to make.
            log: for the errors of `command`.
        """
        super().__init__()
        self.command, self.ready, self.rows, self.log = command, ready, rows, log
        self.pending = set(pending)
        self.outputs: dict[int, list[str]] = {}  # of the jobs that have started
        self.shown = self._whole()
        self.child: subprocess.Popen | None = None
        self.children = ExitStack()

    def _whole(self) -> int:
        """Return the number of complete rows."""
        return sum(self.pending.isdisjoint(value_of(row, part) for part in PARTS) for row in self.rows)

    def emit(self, record: Any) -> None:  # Snakemake adds fields to logging's record
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
        """Start to make the page if it would show more rows; the last row is shown by the page's own job."""
        busy = self.child is not None and self.child.poll() is None
        whole = self._whole()
        if busy or not self.shown < whole < len(self.rows) or not self.ready():
            return
        self.wait()
        try:
            with self.log.open("w") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": log, "text": True}
                started = start_child(self.command, surroundings.clear(os.environ), **pipes)
                self.child = self.children.enter_context(started)
            if self.child.stdin:
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
