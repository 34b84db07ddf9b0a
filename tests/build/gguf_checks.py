"""Run in envs/llama_cpp: what test_gguf.py asserts, as JSON.

    python tests/build/gguf_checks.py MODEL ARTIFACT...

Files are read by llama.cpp's own Python package, and scored by the engine beside transformers.
"""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from quantmill import engines, llamacpp
from quantmill.checkpoint import shards
from quantmill.common.program import UserError
from quantmill.gate import fidelity
from quantmill.layouts import gguf
from quantmill.quality import teacher_forcing

model, *artifacts = map(Path, sys.argv[1:])
package = llamacpp.gguf()
text = teacher_forcing.read_text(model / "evaluation.json", "gptq-2048")
exact = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}


def perplexity(engine: engines.Engine) -> float:
    found = fidelity.Predictions(engine, text).perplexity
    engine.close()
    return found


facts: dict[str, Any] = {"files": {}, "perplexity": {}}
facts["perplexity"]["transformers"] = perplexity(engines.load("transformers", model / "safetensors", "cpu", 1))
for artifact in artifacts:
    kind = artifact.name.removeprefix("gguf-")
    tensors = package.GGUFReader(artifact / "model.gguf").tensors
    facts["files"][kind] = {
        "types": dict(Counter(tensor.tensor_type.name for tensor in tensors).most_common()),
        "bits_per_weight": 8 * sum(int(t.n_bytes) for t in tensors) / sum(int(t.n_elements) for t in tensors),
    }
    facts["perplexity"][kind] = perplexity(engines.load("llama_cpp", artifact, "cpu", 1, **exact))

# queries of the first layer in place of another one's: the bytes of one tensor, the name of the other
swapped = Path(shutil.copytree(artifacts[1], model / "swapped"))
reader = package.GGUFReader(swapped / "model.gguf", "r+")
first, other = (next(t for t in reader.tensors if t.name == f"blk.{layer}.attn_q.weight") for layer in (0, 3))
first.data[:] = other.data
reader.data.flush()
source = shards.find(model / "safetensors")
try:
    gguf.read(swapped, source)(source.tensors()["model.layers.0.self_attn.q_proj.weight"])
except UserError as error:
    facts["swapped"] = str(error)
print(json.dumps(facts))
