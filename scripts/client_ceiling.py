#!/usr/bin/env python3
"""Measure how many events a second the client of served engines can take with one core of this machine.

    python scripts/client_ceiling.py OUT.json

A served figure counts only below half of that. It depends on the processor alone, so that once a machine is enough;
other programs that run meanwhile make it smaller.
"""

from pathlib import Path

from common.program import parser, run
from common.publish import publish_json
from serving import ceiling


def main() -> None:
    """Measure, and write the result."""
    arguments = parser(__doc__)
    arguments.add_argument("out", type=Path, help="JSON to write")
    options = arguments.parse_args()
    found = ceiling.measure()
    publish_json(options.out, found)
    print(f"{options.out}: {found['events_per_core_second']:,.0f} events a second and core")


if __name__ == "__main__":
    run(main)
