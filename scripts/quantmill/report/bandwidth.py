"""One memory bandwidth for each device of a study, of which every row's `bandwidth_fraction` is a share."""

from collections.abc import Sequence

from quantmill.report.rows import Row


def share(rows: Sequence[Row]) -> None:
    """Set `device_bandwidth` of every row that was measured, and its shares of it, other ways to decode included.

    Every latency job copies memory itself, and what disturbs the job disturbs the copy. So the device's bandwidth is
    the best that an undisturbed row saw; if all were disturbed, it is the best of all, and `disturbed` says so.
    """
    copied = [(each, own) for each in rows if (own := each["copy_bandwidth_bytes_per_second"])]
    for device in {each["device"] for each, _ in copied}:
        group = [(each, own) for each, own in copied if each["device"] == device]
        quiet = [own for each, own in group if not each["interference"]]
        best = max(quiet or [own for _, own in group])
        for row, own in group:
            row["device_bandwidth"] = {"bytes_per_second": best, "disturbed": not quiet}
            for figures in (row, row["latency_summary"], *(row["other_modes"] or ())):
                if figures and figures["bandwidth_fraction"] is not None:
                    figures["bandwidth_fraction"] *= own / best
