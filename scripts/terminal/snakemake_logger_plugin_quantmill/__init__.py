"""Snakemake logger for a terminal: steps done, an estimate of the time left, and the running jobs with their progress.

    PYTHONPATH=scripts/terminal snakemake --logger quantmill ...

Errors and warnings appear as Snakemake writes them. Its full log is in .snakemake/log.

snakemake-logger-plugin-rich 0.5.1 does not replace it: it shows progress by rule and the log of a failed job, but not
the last line of a running one, and it redraws eight times a second while speeds are measured.
"""

import logging
import re
import shutil
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

REFRESH = 2.0  # seconds; drawing takes under a thousandth of that, so no measurement is disturbed
TAIL = 4096  # bytes at the end of a log that are searched for its last line
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x20-\x7e\u00a0-\uffff]")  # colours, and what moves the cursor
INTERRUPTED = "Terminating processes on user request"
NOTICES = ("Nothing to be done", INTERRUPTED, "Complete log")  # messages of Snakemake that are kept
ERASE = "\x1b[{}A\x1b[J"  # goes up n lines and erases everything below


def last_line(log: str) -> str:
    """Return the last line of a job's log, such as its progress bar, or an empty string."""
    try:
        with Path(log).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [CONTROL.sub("", line).strip() for line in re.split(r"[\r\n]+", text)]
    return next(filter(None, reversed(lines)), "")


def duration(seconds: float) -> str:
    """Format seconds: 45 s, 3 min 20 s, 2 h 10 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@dataclass
class Job:
    """Running job."""

    rule: str
    name: str
    log: str
    since: float


@dataclass
class Progress:
    """Jobs that are done, running and left, from Snakemake's events; times in seconds of one clock."""

    started: float
    left: Counter[str] = field(default_factory=Counter)  # jobs of a rule that have not ended
    running: dict[int, Job] = field(default_factory=dict)
    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    total: int = 0

    def hear(self, record: logging.LogRecord, now: float) -> None:
        """Update the counts by one event."""
        facts = vars(record)  # Snakemake adds an event's facts as attributes
        event = facts.get("event")
        if event == LogEvent.RUN_INFO:
            self.left = Counter({rule: count for rule, count in facts["stats"].items() if rule != "total"})
            self.total = self.left.total()
        elif event == LogEvent.JOB_INFO:
            name = " ".join([facts["rule_name"], *map(str, facts["wildcards"].values())])
            self.running[facts["jobid"]] = Job(facts["rule_name"], name, next(iter(facts["log"]), ""), now)
        elif event == LogEvent.JOB_FINISHED and (job := self.running.pop(facts["job_id"], None)):
            self.left[job.rule] -= 1
            self.took[job.rule].append(now - job.since)
        elif event == LogEvent.JOB_ERROR:
            self.running.pop(facts["jobid"], None)
        elif record.getMessage().startswith(INTERRUPTED):
            self.running.clear()

    def estimate(self, now: float) -> float | None:
        """Estimate the seconds left: a job takes as long as its rule's jobs took, and as many run at once as before.

        None until jobs of three quarters of the rules have ended.
        """
        rules = [rule for rule, count in self.left.items() if count]
        if sum(rule in self.took for rule in rules) < 0.75 * len(rules):
            return None
        ended = [seconds for each in self.took.values() for seconds in each]
        mean = {rule: sum(each) / len(each) for rule, each in self.took.items()}
        other = sum(ended) / len(ended) if ended else 0.0
        work = sum(count * mean.get(rule, other) for rule, count in self.left.items())
        work -= sum(min(now - job.since, mean.get(job.rule, other)) for job in self.running.values())
        at_once = max(1.0, (sum(ended) + sum(now - job.since for job in self.running.values())) / (now - self.started))
        return work / at_once

    def lines(self, now: float, width: int) -> list[str]:
        """Return what the terminal shows: a line of totals, and one for each running job."""
        seconds = self.estimate(now)
        done = self.total - self.left.total()
        head = f"{done} of {self.total} steps, {duration(now - self.started)}"
        head += f"; about {duration(seconds)} to go" if seconds is not None else ""
        jobs = [
            f"  {job.name}, {duration(now - job.since)}  {last_line(job.log) if job.log else ''}"
            for job in self.running.values()
        ]
        return [line.rstrip()[: width - 1] for line in (head, *jobs)]


class LogHandler(LogHandlerBase):
    """Redraws a few lines at the end of the terminal, and writes messages that are kept above them."""

    writes_to_stream, writes_to_file = True, False
    has_filter = False  # Snakemake's own filter: --quiet and the like
    has_formatter = needs_rulegraph = False

    def __post_init__(self) -> None:
        self.progress = Progress(time.monotonic())
        self.drawn = 0  # lines
        self.over = threading.Event()
        threading.Thread(target=self._redraw, daemon=True).start()

    def _redraw(self) -> None:
        while not self.over.wait(REFRESH):
            self.acquire()
            try:
                self._draw()
            finally:
                self.release()

    def _draw(self, kept: str = "") -> None:
        """Write `kept`, which stays, and the progress below it."""
        size = shutil.get_terminal_size()
        lines = self.progress.lines(time.monotonic(), size.columns)[: size.lines - 1] if self.progress.running else []
        erase = ERASE.format(self.drawn) if self.drawn else ""
        sys.stderr.write(erase + "".join(f"{line}\n" for line in (*filter(None, [kept]), *lines)))
        sys.stderr.flush()
        self.drawn = len(lines)

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        self.progress.hear(record, time.monotonic())
        # Snakemake's last messages, and Quantmill's summary
        notice = record.getMessage().startswith(NOTICES) or hasattr(record, "summary")
        stays = event == LogEvent.JOB_ERROR or record.levelno >= logging.WARNING or notice
        if stays or event in (LogEvent.JOB_INFO, LogEvent.JOB_FINISHED):
            self._draw(self.format(record) if stays else "")

    def close(self) -> None:
        self.over.set()
        super().close()
