"""Say in one line what is wrong with a study's file, before Snakemake says it in many.

.venv/bin/python scripts/quantmill plan.check_config CONFIG
"""

from pathlib import Path

from quantmill.common.program import UserError, parser
from quantmill.plan.config_values import ConfigError, check_file


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
