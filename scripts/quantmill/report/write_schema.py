"""Write the columns of report/columns.py into results.schema.json, the published schema of results.json.

    python scripts/quantmill report.write_schema

Everything else in that file is written by hand and stays.
"""

import json
import textwrap
from typing import Any

from quantmill.common.program import parser
from quantmill.report.columns import SCHEMA, schema

WIDTH = 120


def layout(value: Any, indent: str = "", before: int = 0) -> str:
    """Format JSON in few readable lines of `WIDTH`. `before`: characters of the line that precede the value."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + before + len(line) < WIDTH or not isinstance(value, dict | list):
        return line
    deeper = f"{indent}  "
    if isinstance(value, dict):
        pairs = ((f"{json.dumps(name)}: ", each) for name, each in value.items())
        lines = [f"{deeper}{name}{layout(each, deeper, len(name))}" for name, each in pairs]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if all(isinstance(each, str) for each in value):  # names, which are not broken
        words = ", ".join(map(json.dumps, value))
        filled = textwrap.fill(words, WIDTH, initial_indent=deeper, subsequent_indent=deeper, break_on_hyphens=False)
        return f"[\n{filled}\n{indent}]"
    return "[\n" + ",\n".join(f"{deeper}{layout(each, deeper)}" for each in value) + f"\n{indent}]"


def main() -> None:
    parser(__doc__).parse_args()
    SCHEMA.write_text(layout(schema()) + "\n", encoding="utf-8")
