"""Write study.json: the checked config, and a cell for each row.

It comes on standard input as JSON, compressed by zlib, in base64, since a command's length is limited.

python scripts/quantmill report.write_study OUT < STUDY
"""

import base64
import sys
import zlib
from pathlib import Path

from quantmill.common.atomic import write_atomically
from quantmill.common.program import parser


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("out", type=Path)
    options = arguments.parse_args()
    with write_atomically(options.out) as partial:
        partial.write_bytes(zlib.decompress(base64.b64decode(sys.stdin.read())))
