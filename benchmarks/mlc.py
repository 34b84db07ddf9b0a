#!/usr/bin/env python3
"""Time build.mlc against `cp` of its input, in turn, as benchmarks/convert.py does.

    python3 benchmarks/mlc.py FOLDER [--layers 9] [--runs 7]

Writes a Llama of 1.1B's shape with random float16 weights to FOLDER, by default of 9 layers, 1.05 GB, then runs in
turn, RUNS times: cp; the program; the program on one core; and its weights without hashes of the artifact and without
flushing to the disk. FOLDER needs room for three times the model. Needs Linux, envs/torch and envs/tools.
"""

import argparse
import json
import os
import shutil
import statistics
from collections import defaultdict
from pathlib import Path

from convert import REPO, TOOLS, TORCH, run, settle

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
WEIGHTS = """
import sys; sys.path.insert(0, 'scripts')
from pathlib import Path
from quantmill.checkpoint import shards
from quantmill.mlc import parameters, source_config
from quantmill.mlc import shards as mlc_shards
source, target = shards.find(Path(sys.argv[1])), Path(sys.argv[2])
config = source_config.read(source.config(), source.folder)
found = parameters.find(source, config, parameters.LAYOUTS['q4f16_1'])
target.mkdir()
mlc_shards.write(target, found, parameters.count_weights(source, found))
"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--layers", type=int, default=9)
    arguments.add_argument("--runs", type=int, default=7)
    options = arguments.parse_args()
    os.chdir(REPO)
    options.folder.mkdir(parents=True, exist_ok=True)
    source, target, config = (options.folder / name for name in ("safetensors", "target", "config.json"))
    config.write_text(json.dumps(SHAPE | {"num_hidden_layers": options.layers}))
    run([TORCH, "scripts/quantmill", "fetch.random_weights", config, source])
    program = [TOOLS, "scripts/quantmill", "build.mlc", source, target, "--weights-only"]
    program += ["--parameters", '{"quantization": "q4f16_1"}']
    commands: dict[str, list[object]] = {
        "cp": ["cp", "-r", source, target],
        "build.mlc": program,
        "  on one core": ["taskset", "--cpu-list", "0", *program],
        "  its weights alone": [TOOLS, "-P", "-c", WEIGHTS, source, target],
    }
    results = defaultdict(list)
    for _ in range(options.runs):
        for name, command in commands.items():
            settle(options, source, target)
            results[name].append(run(command))
    size = (source / "model.safetensors").stat().st_size
    cp = statistics.median(each["seconds"] for each in results["cp"])
    print(f"{size / 1e9:.2f} GB, n = {options.runs}")
    print(f"{'':20} {'median s':>9} {'range':>13} {'x cp':>5} {'CPU s':>6} {'MB per CPU s':>13} {'peak MiB':>9}")
    for name, runs in results.items():
        seconds = [each["seconds"] for each in runs]
        median = statistics.median(seconds)
        cpu, mib = (statistics.median(each[key] for each in runs) for key in ("cpu", "mib"))
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        rate = size / 1e6 / cpu
        print(f"{name:20} {median:9.2f} {spread:>13} {median / cp:5.2f} {cpu:6.2f} {rate:13.0f} {mib:9.0f}")
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
