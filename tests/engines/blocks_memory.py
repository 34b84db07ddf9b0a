"""Run in envs/torch: how much memory a model takes that runs block by block, as JSON: python blocks_memory.py LAYERS"""

import json
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from blocks_checks import logits, make

from quantmill import engines

MIB = 2**20
WIDE = {"hidden_size": 512, "intermediate_size": 1536}
BLOCK = 4 * (3 * 512 * 512 + 3 * 512 * 1536) / MIB  # of two key-value heads of four; float32


def status(name: str) -> float:
    """Return an entry of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) / 1024


with tempfile.TemporaryDirectory() as temporary:
    layers = int(sys.argv[1])
    small = make(Path(temporary, "small"), "llama")
    folder = make(Path(temporary, "wide"), "llama", **WIDE, num_hidden_layers=layers)
    logits(engines.load("transformers", small, "cpu", 1, stream=True))  # libraries' own memory
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = status("VmRSS")
    logits(engines.load("transformers", folder, "cpu", 1, stream=True))
    added = status("VmHWM") - before
    resource.setrlimit(resource.RLIMIT_DATA, (int((status("VmData") + 9 * BLOCK) * MIB), -1))
    engine = engines.load("transformers", folder, "cpu", 1)
    logits(engine)
    print(json.dumps({"blocks_added": added / BLOCK, "streams_under_a_limit": engine.streamed is not None}))
