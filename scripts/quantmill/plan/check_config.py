"""Report a mistake in a study's file in one line, where Snakemake would print many.

.venv/bin/python scripts/quantmill plan.check_config CONFIG
"""

from pathlib import Path

from quantmill.common.program import UserError, parser
from quantmill.plan.config_values import ConfigError, check_file


def check(config: Path) -> None:
    """Raise `UserError` for a file that Snakemake cannot read as a study."""
    try:
        check_file(config)
    except ConfigError as error:
        raise UserError(f"config: {error}") from None


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("config", type=Path)
    check(arguments.parse_args().config)
