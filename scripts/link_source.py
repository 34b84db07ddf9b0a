#!/usr/bin/env python3
"""Take a local checkpoint as it is: link its files to the artifacts and record their hashes.

    python scripts/link_source.py SRC DST --kind path

SRC must hold config.json and weights (safetensors or .bin, sharded or not); nothing is copied or changed.
"""

from pathlib import Path

from checkpoint import headers, shards
from common import manifest
from common.program import parser, run
from common.publish import place, publish


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("src", type=Path, help="folder of the checkpoint")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument(
        "--kind", choices=["demo", "path"], default="path", help="what the manifest calls the source"
    )
    options = arguments.parse_args()

    source = shards.find(options.src)
    shards.refuse_quantized(options.src, source.config())
    headers.check(options.src / "config.json", source.config())
    files = [*source.files, *filter(None, [source.index()]), *source.others()]
    for file in files:
        shards.refuse_pointer(file)
    hashes = {file.name: manifest.sha256(file) for file in source.files}
    with publish(options.dst, source=options.src) as folder:
        folder.mkdir()
        for file in files:
            place(file, folder / file.name)
        manifest.write(
            folder,
            format="source",
            tool="link_source",
            tool_version="1",
            source={
                "kind": options.kind,
                "path": str(options.src),
                "commit": None,
                "sha256": hashes,
            },
            weight_files=list(hashes),
            hashes=hashes,
        )


if __name__ == "__main__":
    run(main)
