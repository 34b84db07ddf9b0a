"""Write what the report is to hold (run by Snakemake's `script:`): the checked config and a cell a model and format."""

import json
from pathlib import Path
from typing import Any

from common.program import run
from common.publish import publish

snakemake: Any = globals()["snakemake"]  # put there by Snakemake


def main() -> None:
    with publish(Path(snakemake.output[0])) as partial:
        partial.write_text(json.dumps(snakemake.params.study, indent=2) + "\n", encoding="utf-8")


run(main)
