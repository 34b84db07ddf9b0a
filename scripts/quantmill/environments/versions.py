"""List the versions that are pinned, and those that recorded results were measured with, on CPUs and on GPUs.

    python scripts/quantmill environments.versions results/versions.json

Reads envs/*.txt, results/*/results.json, and results of jobs in results/*/*/*.json. docs/VERSIONS.md shows the list
(make readme).
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from quantmill.common import bounded_json
from quantmill.common.atomic import write_atomically
from quantmill.common.program import parser
from quantmill.environments.bundle import read_pins

SAME = "apache-tvm auto-round autoawq bitsandbytes ctranslate2 exllamav3 gptqmodel hqq torch torchao transformers vllm"
# name of an engine or build tool in results -> package
PACKAGES = {name: name for name in SAME.split()} | {"llama.cpp": "llama-cpp-python", "llm-compressor": "llmcompressor"}


def measurements(root: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the device's name and the versions of every recorded row and job."""
    for path in root.glob("results/*/results.json"):
        for row in bounded_json.loads(path.read_bytes())["rows"]:
            if row["device"] and row["versions"]:
                yield row["device"], row["versions"] | {row["artifact"]["tool"]: row["artifact"]["tool_version"]}
    for path in root.glob("results/*/*/*.json"):
        result = bounded_json.loads(path.read_bytes())
        if isinstance(result, dict) and "versions" in result and isinstance(result.get("device"), dict):
            yield result["device"]["name"], result["versions"]


def list_versions(root: Path) -> list[dict[str, str]]:
    """Return a row for each package, from the pins and the recorded results of a checkout."""
    pinned: dict[str, set[str]] = defaultdict(set)
    for path in (*root.glob("envs/*.txt"), *root.glob("envs/*.sdist")):
        for name, version in read_pins(path):
            pinned[name.removesuffix("-cpu")].add(f"{version} ({path.stem})" if "vllm" in name else version)
    measured: dict[tuple[str, str], set[str]] = defaultdict(set)
    for device, versions in measurements(root):
        for name, version in versions.items():
            known = version.removeprefix("llama-cpp-python-").partition("-")[0]
            measured[name, "GPU" if "NVIDIA" in device else "CPU"].add(known)
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
