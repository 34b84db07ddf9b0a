"""One workflow at a time in artifacts/, which may be a link to a folder that others work in too."""

import _thread
import signal

from quantmill.common import workflow_lock
from quantmill.common.program import UserError

ARTIFACTS, RECORDS = Path("artifacts"), Path(".snakemake")

# jobs of a cluster read this file too; another workflow that uses this one as a module has hooks and records of its own
if workflow.is_main_process and Path(workflow.basedir).samefile(CHECKOUT):
    if not os.access(RECORDS if RECORDS.exists() else ".", os.W_OK):
        sys.exit(
            f"error: {Path.cwd()}: cannot be written, and Snakemake keeps its records there; work in another folder"
        )
    LAST = workflow_lock.read(ARTIFACTS)
    workflow_lock.share_records(ARTIFACTS, RECORDS)


def heed_signals():
    """End as after Ctrl-C where the terminal is closed (after nohup it means nothing), and never wait for SIGTERM's
    handler: Snakemake's waits for a lock that what it has interrupted may hold."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    finish = signal.getsignal(signal.SIGTERM)
    if callable(finish):
        signal.signal(signal.SIGTERM, lambda number, frame: _thread.start_new_thread(finish, (number, None)))


def work_alone():
    """Hold the lock where jobs will write something; Snakemake ends with one line where another workflow holds it. Its
    own lock is off (profiles/default), because it outlives a run that was killed."""
    if any(job.output for job in workflow.dag.needrun_jobs()):
        try:
            workflow_lock.hold(ARTIFACTS, LAST)
            workflow_lock.share_records(ARTIFACTS, RECORDS, begin=True)
        except UserError as error:
            refuse(error)
