"""Run in envs/mlc: what the engine makes of an artifact, for transformers_checks.py.

    python engine_run.py ARTIFACT IDS.json PROMPT TOKENS OUT.npz [--threads 1] [--gpu-model] [--warpgroups]

With --gpu-model the GPU's model, float16, runs instead: its kernels' sources and all else compiled for this processor;
with --warpgroups as for a GPU that has instructions for them.
"""

import argparse
import json
import os
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))
arguments = argparse.ArgumentParser()
arguments.add_argument("artifact", type=Path)
arguments.add_argument("ids", type=Path)
arguments.add_argument("prompt", type=int)
arguments.add_argument("tokens", type=int)
arguments.add_argument("out", type=Path)
arguments.add_argument("--threads", type=int, default=1)
arguments.add_argument("--gpu-model", action="store_true")
arguments.add_argument("--warpgroups", action="store_true")
options = arguments.parse_args()
if options.gpu_model:
    os.environ["TVM_USE_RUNTIME_LIB"] = "0"

import numpy as np  # noqa: E402

from quantmill import engines  # noqa: E402
from quantmill.mlc import architecture, shards  # noqa: E402

ids = json.loads(options.ids.read_text())
if options.gpu_model:
    import cuda_on_cpu
    import tvm
    from tvm.runtime.vm import VirtualMachine

    from quantmill.engines.quantmill_tvm import CudaSession
    from quantmill.mlc import cuda, library

    served = architecture.of_artifact(options.artifact)
    shape = served.architecture
    kernels = cuda_on_cpu.Kernels(options.warpgroups)
    model = cuda.Model(shape, options.warpgroups)
    module, _ = model.export_tvm(spec=model.get_default_spec())[:2]
    kernels.load(options.out.parent)
    machine = VirtualMachine(tvm.compile(module, library.cpu_target()), tvm.cpu())
    bias = np.zeros(shape.vocab_size, np.float32)
    bias[served.stop_ids] = -np.inf
    arrays = shards.read(options.artifact, shape.parameters())
    session = CudaSession(machine, tvm.cpu(), shape, arrays, bias)
    session.start(len(ids))
    half = len(ids) // 2
    chunks = [session.score(ids[:half]), session.score(ids[half:])]
    session.start(options.prompt + options.tokens)
    tokens = list(session.tokens(ids[: options.prompt], options.tokens))
    facts = {}
else:
    engines.CHUNK_LOGITS = 1  # the smallest chunks, so that their seams are crossed
    engine = engines.load("quantmill-tvm", options.artifact, "cpu", options.threads)
    chunks = list(engine.logits(ids))
    same = all((left == right).all() for left, right in zip(chunks, engine.logits(ids), strict=True))
    tokens = [token for _, token, _ in engine.decode([ids[: options.prompt]], options.tokens)]
    again = [token for _, token, _ in engine.decode([ids[: options.prompt]], options.tokens)]
    facts = {
        "again": same and tokens == again,
        "versions": engine.versions(),
        "weight_bytes": engine.weight_bytes(),
        "compute_type": engine.compute_type,
        "dtype": str(chunks[0].dtype),
    }
    engine.close()
np.savez(options.out, ids=ids, logits=np.concatenate(chunks), tokens=tokens, prompt=options.prompt)
print(json.dumps(facts | {"chunks": [len(chunk) for chunk in chunks]}))
