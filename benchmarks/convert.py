#!/usr/bin/env python3
"""Time .bin -> safetensors -> .bin against `cp` of the same bytes and against safetensors' script.

    python3 benchmarks/convert.py FOLDER [--gigabytes 4] [--runs 7] [--sparse 20]

Writes a checkpoint of random float16 in two shards with torch.save to FOLDER, then runs in turn, RUNS times: cp; each
program without checks, with some, and with --verify (CRCs, comparison, SHA-256, flush to the disk); and
torch.load, save_file, load_file and torch.equal, as safetensors' own script (bindings/python/convert.py) does. Before
each run the disk is idle and the input in memory. Finally it converts one sparse file, for its memory. FOLDER needs
room for three times the checkpoint. Needs Linux, envs/torch and envs/tools.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TOOLS, TORCH = (REPO / f"envs/{env}/bin/python" for env in ("tools", "torch"))
TENSOR = 100 * 2**20  # bytes of each tensor but one

# Two .bin shards of random float16, with index and config
MAKE = f"""
import json, pathlib, sys, torch
folder, count = pathlib.Path(sys.argv[1]), max(2, round(float(sys.argv[2]) * 10**9 / {TENSOR}))
folder.mkdir(parents=True)
(folder / 'config.json').write_text('{{}}')
weight_map = {{}}
for shard, numbers in enumerate((range(count // 2), range(count // 2, count)), 1):
    file = f'pytorch_model-{{shard:05d}}-of-00002.bin'
    tensors = {{f'layers.{{number}}.weight': torch.randn(1024, {TENSOR} // 2048).half() for number in numbers}}
    torch.save(tensors, folder / file)
    weight_map |= dict.fromkeys(tensors, file)
(folder / 'pytorch_model.bin.index.json').write_text(json.dumps({{'weight_map': weight_map}}))
"""
# --verify without the SHA-256 (checks = "CRC, compare, flush"), or without more (checks = "CRC")
PARTLY = """
import sys; sys.path.insert(0, 'scripts')
from pathlib import Path
from quantmill.checkpoint import conversion, sharding, shards, torch_zip
checks, source, target = sys.argv[1], shards.find(Path(sys.argv[2])), Path(sys.argv[3])
target.mkdir()
groups = sharding.group_by_file(list(source.tensors().values()))
for file in source.files if checks == 'CRC' else ():
    torch_zip.check(file)
conversion.convert(groups, target, 'safetensors', verify=checks != 'CRC', hash=False)
"""
OFFICIAL = """
import sys, torch, pathlib
from safetensors.torch import load_file, save_file
for path in sorted(pathlib.Path(sys.argv[1]).glob('*.bin')):
    target = pathlib.Path(sys.argv[2], path.stem + '.safetensors')
    target.parent.mkdir(exist_ok=True)
    loaded = {name: value.contiguous() for name, value in torch.load(path, weights_only=True).items()}
    save_file(loaded, target, metadata={'format': 'pt'})
    reloaded = load_file(target)
    assert all(torch.equal(value, reloaded[name]) for name, value in loaded.items())
"""


def make_sparse(folder: Path, gigabytes: float) -> None:
    """Write a sparse .bin file that is nominally large."""
    sys.path.insert(0, str(REPO / "scripts"))
    from quantmill.checkpoint import torch_pickle
    from quantmill.checkpoint.zip_directory import crc32
    from quantmill.checkpoint.zip_writer import ZipWriter

    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    rows = round(gigabytes * 10**9 / 2 / 4096 / 20)
    tensors = [(f"layers.{number}.weight", "F16", (rows, 4096)) for number in range(20)]
    zeros = crc32(bytes(rows * 4096 * 2))
    with (folder / "pytorch_model.bin").open("wb", buffering=0) as file:
        archive = ZipWriter(file)
        pickled = torch_pickle.dumps(tensors)
        archive.begin("archive/data.pkl", len(pickled), crc32(pickled))
        file.write(pickled)
        for number in range(len(tensors)):
            archive.begin(f"archive/data/{number}", rows * 4096 * 2, zeros)
            file.seek(rows * 4096 * 2, os.SEEK_CUR)
        archive.finish()


def settle(options: argparse.Namespace, source: Path, target: Path) -> None:
    """Remove the last output, flush the disk, and fill memory with cached files, including the input.

    A virtual machine returns free memory to its host, and getting it back costs more than copying. So the measured
    program must not find free memory.
    """
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    filler = options.folder / "filler"
    filler.touch()
    os.truncate(filler, memory)
    for path in (filler, *source.iterdir(), *(options.folder / "safetensors").iterdir()):
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(2**20)
            while file.readinto(buffer):
                pass


def run(command: list[object]) -> dict[str, float]:
    """Run a command; return wall and CPU seconds and peak memory."""
    started = time.perf_counter()
    process = os.posix_spawnp(str(command[0]), [str(part) for part in command], os.environ)
    _, status, usage = os.wait4(process, 0)
    seconds = time.perf_counter() - started
    if status:
        sys.exit(f"error: {command} failed")
    return {"seconds": seconds, "cpu": usage.ru_utime + usage.ru_stime, "mib": usage.ru_maxrss / 1024}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--gigabytes", type=float, default=4)
    arguments.add_argument("--runs", type=int, default=7)
    arguments.add_argument("--sparse", type=float, default=20)
    options = arguments.parse_args()
    os.chdir(REPO)
    source, target, middle = (options.folder / name for name in ("source", "target", "safetensors"))
    run([TORCH, "-P", "-c", MAKE, source, options.gigabytes])
    to_safetensors = [TOOLS, "scripts/quantmill", "checkpoint.to_safetensors"]
    run([*to_safetensors, source, middle])
    to_bin = [TOOLS, "scripts/quantmill", "checkpoint.to_bin", middle, target]
    commands: dict[str, list[object]] = {
        "cp": ["cp", "-r", source, target],
        "to safetensors": [*to_safetensors, source, target],
        "  CRC": [TOOLS, "-P", "-c", PARTLY, "CRC", source, target],
        "  CRC, compare, flush": [TOOLS, "-P", "-c", PARTLY, "CRC, compare, flush", source, target],
        "  --verify (and SHA-256)": [*to_safetensors, source, target, "--verify"],
        "to .bin": to_bin,
        "  --verify": [*to_bin, "--verify"],
        "torch + safetensors": [TORCH, "-P", "-c", OFFICIAL, source, target],
    }
    results = defaultdict(list)
    for _ in range(options.runs):
        for name, command in commands.items():
            settle(options, source, target)
            results[name].append(run(command))
    cp = statistics.median(each["seconds"] for each in results["cp"])
    print(f"{'':26} {'median s':>9} {'range':>13} {'x cp':>5} {'CPU s':>6} {'peak MiB':>9}   n = {options.runs}")
    for name, runs in results.items():
        seconds = [each["seconds"] for each in runs]
        median = statistics.median(seconds)
        cpu, mib = (statistics.median(each[key] for each in runs) for key in ("cpu", "mib"))
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        print(f"{name:26} {median:9.2f} {spread:>13} {median / cp:5.2f} {cpu:6.2f} {mib:9.0f}")
    (options.folder / "filler").unlink()
    for folder in (source, target, middle):
        shutil.rmtree(folder, ignore_errors=True)
    make_sparse(source, options.sparse)
    result = run([*to_safetensors, source, target, "--verify"])
    print(f"sparse, {options.sparse:g} GB, --verify: {result['seconds']:.1f} s, peak {result['mib']:.0f} MiB")
    shutil.rmtree(source)
    shutil.rmtree(target)


if __name__ == "__main__":
    main()
