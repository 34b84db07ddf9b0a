"""Take a local checkpoint as it is: copy its files to the artifacts and record their hashes.

    python scripts/quantmill fetch.link SRC DST --kind path

SRC must hold config.json and weights (safetensors or .bin, sharded or not). It is not changed, and later changes to it
do not reach DST. The copies are reflinks if the file system has them, which cost no disk. Files that do not belong to
the model are left out, and the manifest names them.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quantmill.checkpoint import headers, selection, shards
from quantmill.checkpoint.tensor import refuse_pointer
from quantmill.common import manifest
from quantmill.common.atomic import clone_or_copy, write_atomically
from quantmill.common.program import parser


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
        refuse_pointer(file)
    source.tensors()  # refuses bad headers before a byte is copied
    parameters = selection.report(str(options.src), selection.left_out(options.src, {file.name for file in files}))
    with write_atomically(options.dst, source=options.src) as folder, ThreadPoolExecutor(manifest.HASHERS) as workers:
        folder.mkdir()
        digests = workers.map(clone_or_copy, files, (folder / file.name for file in files))
        hashes = {file.name: digest for file, digest in zip(files, digests, strict=True)}
        weights = {file.name: hashes[file.name] for file in source.files}
        manifest.write(
            folder,
            format="source",
            tool="link_source",
            tool_version="1",
            parameters=parameters,
            source={"kind": options.kind, "path": str(options.src), "commit": None, "sha256": weights},
            weight_files=list(weights),
            hashes=hashes,
        )
        shards.find(folder)  # checks the copy, in case the source changed meanwhile
