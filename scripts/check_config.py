#!/usr/bin/env python3
"""Say in one line what is wrong with a study's file, before Snakemake says it in many.

.venv/bin/python scripts/check_config.py CONFIG
"""

from pathlib import Path

from common.program import UserError, parser, run
from planning.values import ConfigError, check_file


def check(config: Path) -> None:
    """Raises `UserError` for a file that Snakemake cannot read as a study's."""
    try:
        check_file(config)
    except ConfigError as error:
        raise UserError(f"config: {error}") from None


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("config", type=Path)
    check(arguments.parse_args().config)


if __name__ == "__main__":
    run(main)
