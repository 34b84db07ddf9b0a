#!/usr/bin/env python3
"""Compare a server's loads before and after an upgrade, from two results of loads.measure, as rows of a table.

    python benchmarks/compare_loads.py results/vllm-upgrade/before/loads.json results/vllm-upgrade/after/loads.json \\
        results/vllm-upgrade/compared.json
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from quantmill.common.atomic import write_json

FIGURES = {
    "tokens/s of all": "output_tokens_per_second",
    "TTFT, ms": "ttft_ms_p50",
    "TTFT p90, ms": "ttft_ms_p90",
    "TPOT, ms": "tpot_ms_p50",
    "longest gap p90, ms": "itl_ms_max_p90",
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("before", type=Path)
    arguments.add_argument("after", type=Path)
    arguments.add_argument("out", type=Path, help="JSON file to write: a row for each load and figure")
    options = arguments.parse_args()
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (options.before, options.after))
    rows = []
    for old, new in zip(before["loads"], after["loads"], strict=True):
        assert old["load"] == new["load"]
        for title, name in FIGURES.items():
            first, second = old["figures"][name], new["figures"][name]
            row = {"load": old["load"], "figure": title, before["versions"]["vllm"]: f"{first:.4g}"}
            rows.append(row | {after["versions"]["vllm"]: f"{second:.4g}", "after / before": f"{second / first:.3f}"})
    write_json(options.out, rows)


if __name__ == "__main__":
    main()
