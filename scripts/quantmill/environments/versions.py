"""List the versions that are pinned, and those that recorded results were measured with, on CPUs and on GPUs.

    python scripts/quantmill environments.versions results/versions.json

Reads envs/*.txt and results/*/results.json. docs/VERSIONS.md shows the list (make readme).
"""

import json
from collections import defaultdict
from pathlib import Path

from quantmill.common import bounded_json
from quantmill.common.atomic import write_atomically
from quantmill.common.program import parser
from quantmill.environments.bundle import read_pins

SAME = "apache-tvm auto-round autoawq bitsandbytes ctranslate2 exllamav3 gptqmodel hqq torch torchao transformers vllm"
# name of an engine or build tool in results -> package
PACKAGES = {name: name for name in SAME.split()} | {"llama.cpp": "llama-cpp-python", "llm-compressor": "llmcompressor"}


def list_versions(root: Path) -> list[dict[str, str]]:
    """Return a row for each package, from the pins and the recorded results of a checkout."""
    pinned: dict[str, set[str]] = defaultdict(set)
    for path in (*root.glob("envs/*.txt"), *root.glob("envs/*.sdist")):
        for name, version in read_pins(path):
            pinned[name.removesuffix("-cpu")].add(f"{version} ({path.stem})" if "vllm" in name else version)
    measured: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in root.glob("results/*/results.json"):
        rows = bounded_json.loads(path.read_bytes())["rows"]
        for row in filter(lambda row: row["device"] and row["versions"], rows):
            kind = "GPU" if "NVIDIA" in row["device"] else "CPU"
            tool = {row["artifact"]["tool"]: row["artifact"]["tool_version"]}
            for name, version in (row["versions"] | tool).items():
                measured[name, kind].add(version.removeprefix("llama-cpp-python-").partition("-")[0])
    return [
        {
            "package": f"`{package}`",
            "pinned": ", ".join(sorted(pinned[package])),
            "measured on a CPU": ", ".join(sorted(measured[name, "CPU"])) or "none",
            "measured on a GPU": ", ".join(sorted(measured[name, "GPU"])) or "none",
        }
        for name, package in sorted(PACKAGES.items())
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("out", type=Path, help="JSON file to write")
    options = arguments.parse_args()
    with write_atomically(options.out) as partial:
        partial.write_text(json.dumps(list_versions(Path.cwd()), indent=2) + "\n", encoding="utf-8")
