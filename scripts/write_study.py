#!/usr/bin/env python3
"""Write what the report is to hold, which comes as JSON on standard input: the checked config, and a cell for each row.

python scripts/write_study.py OUT < STUDY
"""

import sys
from pathlib import Path

from common.program import parser, run
from common.publish import publish


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("out", type=Path)
    options = arguments.parse_args()
    with publish(options.out) as partial:
        partial.write_text(sys.stdin.read(), encoding="utf-8")


if __name__ == "__main__":
    run(main)
