"""Put a server under loads, and measure what its users would see.

    python scripts/quantmill loads.measure ARTIFACT OUT --engine vllm-serve --evaluation evaluation.json --loads
        SERVING

SERVING is JSON, the study's config of that name (docs/SERVING.md). The server is started afresh for each of its
restarts, by a process that is its client; each start is warmed up, looked at alone, and put under every load. OUT is a
JSON file with figures, findings and what the client took; beside it, OUT with the suffix .npz holds every time of every
request.
"""

import json
import os
import pickle
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from quantmill import devices, engines
from quantmill.checkpoint import is_mixture, shards
from quantmill.common import manifest
from quantmill.common.atomic import work_folder, write_atomically, write_json
from quantmill.common.model_config import of_text
from quantmill.common.program import UserError, parser, start_child
from quantmill.devices import cpu, listeners
from quantmill.devices.monitor import Monitor
from quantmill.loads import client_ceiling, kv_cache, result, worker
from quantmill.loads.job import LoadTask, StartResult
from quantmill.metrics import METRICS_VERSION


def run_job(job: LoadTask, folder: Path) -> StartResult:
    """One start of the server, watched from outside. Where it fails, its own line says why."""
    path = folder / "job.json"
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")
    answer, told = os.pipe()  # what comes back is pickled: no file, which others might write, is read as that
    with (
        Monitor(job.device, listeners.of_options(job.options)) as monitor,
        os.fdopen(answer, "rb") as pipe,
        start_child([*worker.COMMAND, path, told], env=cpu.environment(), pass_fds=[told]) as child,
    ):
        os.close(told)
        pickled = pipe.read()
        status = child.wait()
    if status < 0:
        raise UserError(f"{job.artifact}: its client was killed by signal {-status}; was memory short?")
    if status:
        sys.exit(status)
    came: StartResult = pickle.loads(pickled)
    for each in [*came.start.loads, *came.start.searched]:
        seen = monitor.describe(each.host, each.span, [each.span], each.own)
        each.conditions, each.interference = seen["conditions"], seen["interference"]
    return came


def mixes_experts(artifact: Path) -> bool:
    """Whether the artifact is a mixture of experts, as far as a config.json tells."""
    path = artifact / "config.json"
    return path.is_file() and is_mixture(of_text(shards.read_config(path)))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("artifact", type=Path)
    arguments.add_argument("out", type=Path)
    engines.add_arguments(arguments)
    arguments.add_argument("--loads", type=engines.parse_options, required=True, help="JSON: the config of that name")
    arguments.add_argument("--evaluation", type=Path, required=True, help="what tokens.tokenize_texts wrote")
    arguments.add_argument("--burst", type=Path, help="the same, of the prompts that are sent at once")
    arguments.add_argument("--seed", type=int, default=0, help="of lengths, places of the text, and arrivals")
    options = arguments.parse_args()

    artifact = manifest.read_unchanged(options.artifact)  # refuses what is no artifact before any work
    device = devices.resolve(options.device, gpus=options.gpus)
    limit = client_ceiling.measure()["events_per_core_second"]
    with work_folder(options.out) as folder:
        jobs = [
            LoadTask(
                artifact=str(options.artifact),
                engine=options.engine,
                options=options.options,
                gpus=options.gpus,
                device=device,
                threads=options.threads,
                loads=options.loads,
                evaluation=str(options.evaluation),
                burst=options.burst and str(options.burst),
                seed=options.seed,
                ceiling=limit,
                number=number,
            )
            for number in range(options.loads["restarts"])
        ]
        jobs[0].plan()  # refuses what cannot be sent before any server starts
        came = [run_job(job, folder) for job in jobs]
    first, starts = came[0], [each.start for each in came]
    loads = [
        result.join([each.loads[place] for each in starts], starts[0].findings, options.loads["limits"])
        for place in range(len(starts[0].loads))
    ]
    with write_atomically(options.out.with_suffix(".npz")) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **result.raw(starts))
    memory = [each.peak_memory_bytes for each in came if each.peak_memory_bytes is not None]
    write_json(
        options.out,
        {
            "kind": "loads",
            "metrics_version": METRICS_VERSION,
            "artifact": artifact,
            "engine": options.engine,
            "options": options.options,
            "gpus": options.gpus,
            "protocol": {"loads": options.loads, "seed": options.seed},
            "summary": {
                "startup_s": [each.startup_s for each in starts],
                "nll_shift": first.start.nll_shift,
                "peak_memory_bytes": max(memory, default=None),
            },
            "kv_bytes_per_token": kv_cache.bytes_per_token(
                options.artifact, first.compute_type, first.versions.get("kv cache", kv_cache.AUTO)
            ),
            "mixture": mixes_experts(options.artifact),
            "loads": loads,
            "goodput": result.goodput(starts[0]),
            "client_ceiling": limit,
            "compute_type": first.compute_type,
            "versions": first.versions,
            "device": devices.describe(device, first.threads or options.threads),
        },
    )
