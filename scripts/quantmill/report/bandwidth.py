"""One memory bandwidth for each device of a study, which every row's share of it is of."""

from collections.abc import Sequence
from typing import Any


def share(rows: Sequence[dict[str, Any]]) -> None:
    """Set `device_bandwidth` of every row that was measured, and its shares of it, other ways to decode included.

    Every latency job copies memory itself, and what disturbs the job disturbs the copy. So the device's bandwidth is
    the best that an undisturbed row saw; where all were disturbed, the best of all, and `disturbed` says so.
    """
    measured = [row for row in rows if row["copy_bandwidth_bytes_per_second"]]
    for device in {row["device"] for row in measured}:
        group = [row for row in measured if row["device"] == device]
        quiet = [row for row in group if not row["interference"]]
        best = max(row["copy_bandwidth_bytes_per_second"] for row in quiet or group)
        for row in group:
            row["device_bandwidth"] = {"bytes_per_second": best, "disturbed": not quiet}
            own = row["copy_bandwidth_bytes_per_second"] / best
            for figures in (row, row["latency_summary"], *row["other_modes"]):
                if figures["bandwidth_fraction"] is not None:
                    figures["bandwidth_fraction"] *= own
