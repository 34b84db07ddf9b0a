"""Take a local checkpoint as it is: copy its files to the artifacts and record their hashes.

    python scripts/quantmill fetch.link SRC DST --kind path

SRC must hold config.json and weights (safetensors or .bin, sharded or not). It is not changed, and later changes to it
do not reach DST. The copies are reflinks if the file system has them, which cost no disk. Weights in low bits are
decoded (quantmill.layouts.published). Files that do not belong to the model are left out, and the manifest names them.
"""

from pathlib import Path

from quantmill.checkpoint import headers, selection, shards
from quantmill.checkpoint.tensor import refuse_pointer
from quantmill.common.program import parser
from quantmill.fetch import write_source


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("src", type=Path, help="folder of the checkpoint")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument(
        "--kind", choices=["demo", "path"], default="path", help="what the manifest calls the source"
    )
    options = arguments.parse_args()

    source = shards.find(options.src)
    headers.check(options.src / "config.json", source.config())
    files = [*source.files, *filter(None, [source.index()]), *source.others()]
    for file in files:
        refuse_pointer(file)
    source.tensors()  # refuses bad headers before a byte is copied
    parameters = selection.report(str(options.src), selection.left_out(options.src, {file.name for file in files}))
    origin = {"kind": options.kind, "path": str(options.src), "commit": None}
    facts = {"tool": "link_source", "tool_version": "1", "parameters": parameters}
    write_source(options.dst, {file.name: file for file in files}, {}, origin, **facts)
