"""Fetch a model from the Hugging Face Hub, at one commit, and check every file's hash.

    python scripts/quantmill fetch.model ORGANISATION/NAME DST [--revision main]

Weights come in one form, safetensors if there are any, else .bin. Files land in the hub's own cache for later runs, and
DST gets copies: reflinks if the file system has them. Weights in low bits are decoded (quantmill.layouts.published).
The token is that of HF_TOKEN or of `hf auth login`.
"""

from pathlib import Path

import huggingface_hub

from quantmill.checkpoint import headers, selection, shards
from quantmill.common.model_config import context_of
from quantmill.common.program import UserError, parser, printable
from quantmill.fetch import hub, write_source
from quantmill.layouts import published


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("repository")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--revision", default="main", help="branch, tag or commit")
    arguments.add_argument(
        "--most-tokens",
        type=int,
        default=0,
        help="of the study's longest prompt and answer, or its memory_at; a model with a shorter context is refused",
    )
    options = arguments.parse_args()

    repository = hub.resolve(options.repository, options.revision)
    names = selection.select(repository.name, repository.files)
    config = hub.fetch(repository, ["config.json"])["config.json"]  # before any weights
    words = shards.read_config(config)
    published.scheme(repository.name, words)
    headers.check(Path(repository.name, "config.json"), words)
    context = context_of(words)
    if context is not None and context < options.most_tokens:
        raise UserError(
            f"{repository.name}: its context is {context} tokens, and the study asks for {options.most_tokens}, a "
            "prompt and its answer; lower latency.new_tokens, the lengths of loads, or memory_at.context"
        )
    files = hub.fetch(repository, names)
    left_out = sorted(map(printable, repository.files.keys() - {*names}))
    origin = {"kind": "hub", "hub": repository.name, "revision": options.revision, "commit": repository.commit}
    facts = {"tool": "download", "tool_version": f"huggingface_hub {huggingface_hub.__version__}"}
    expected = {name: file.sha256 for name, file in repository.files.items()}
    parameters = selection.report(repository.name, left_out)
    write_source(options.dst, files, expected, origin, **facts, parameters=parameters)
