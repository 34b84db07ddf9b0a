"""One workflow at a time in artifacts/, which may be a link to a shared folder."""

import _thread
import signal

from quantmill.common import workflow_lock
from quantmill.common.program import UserError

ARTIFACTS, RECORDS = Path("artifacts"), Path(".snakemake")

# a cluster's jobs read this file too; a workflow that uses this one as a module has its own hooks and records
if workflow.is_main_process and Path(workflow.basedir).samefile(CHECKOUT):
    if not os.access(RECORDS if RECORDS.exists() else ".", os.W_OK):
        sys.exit(
            f"error: {Path.cwd()}: cannot be written, and Snakemake keeps its records there; work in another folder"
        )
    LAST = workflow_lock.read(ARTIFACTS)
    workflow_lock.share_records(ARTIFACTS, RECORDS)


def heed_signals():
    """End as after Ctrl-C when the terminal closes, except after nohup. Run SIGTERM's handler in a thread: Snakemake's
    waits for a lock that the interrupted code may hold."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    finish = signal.getsignal(signal.SIGTERM)
    if callable(finish):
        signal.signal(signal.SIGTERM, lambda number, frame: _thread.start_new_thread(finish, (number, None)))


def work_alone():
    """Take the lock if jobs will write something; if another workflow holds it, Snakemake ends with one line. Snakemake's
    own lock is off (profiles/default), because it survives a killed run."""
    if any(job.output for job in workflow.dag.needrun_jobs()):
        try:
            workflow_lock.hold(ARTIFACTS, LAST)
            workflow_lock.share_records(ARTIFACTS, RECORDS, begin=True)
        except UserError as error:
            refuse(error)
