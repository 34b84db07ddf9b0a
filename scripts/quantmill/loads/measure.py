"""Put a server under loads, and measure what its users would see.

    python scripts/quantmill loads.measure ARTIFACT OUT --engine vllm-serve --evaluation evaluation.json --loads LOADS

LOADS is JSON, the study's config of that name (docs/SERVING.md). Each of its `restarts` is a fresh start of the server,
by a process that is the client. It warms the server up, checks it alone, and puts it under every load. OUT is a JSON
file with figures, findings and what the client used. The same name with the suffix .npz has all times of all requests.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from quantmill import devices, engines
from quantmill.checkpoint import is_mixture, shards
from quantmill.common import manifest
from quantmill.common.atomic import work_folder, write_atomically, write_json
from quantmill.common.model_config import of_text
from quantmill.common.program import parser
from quantmill.devices import listeners
from quantmill.devices.fresh_process import run_task
from quantmill.devices.monitor import Monitor
from quantmill.loads import client_ceiling, result, worker
from quantmill.loads.job import LoadTask, StartResult
from quantmill.metrics import METRICS_VERSION


def start_server(job: LoadTask) -> StartResult:
    """Run one start of the server in a fresh process, and sample the device meanwhile."""
    with Monitor(job.device, listeners.of_options(job.options)) as monitor:
        came: StartResult = run_task(worker.COMMAND, job)
    for each in [*came.start.loads, *came.start.searched]:
        host = asdict(each.host) if each.host else None
        seen = monitor.describe(host, each.span, [each.span], each.own)
        each.conditions, each.interference = seen["conditions"], seen["interference"]
    return came


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("artifact", type=Path)
    arguments.add_argument("out", type=Path)
    engines.add_arguments(arguments)
    arguments.add_argument("--loads", type=engines.parse_options, required=True, help="JSON: the config of that name")
    arguments.add_argument("--evaluation", type=Path, required=True, help="written by tokens.tokenize_texts")
    arguments.add_argument("--burst", type=Path, help="the same, of the prompts that are sent at once")
    arguments.add_argument("--seed", type=int, default=0, help="of lengths, places of the text, and arrivals")
    options = arguments.parse_args()

    artifact = manifest.read_unchanged(options.artifact)  # refuses what is not an artifact before any work
    device = devices.resolve(options.device, gpus=options.gpus)
    limit = client_ceiling.measure()
    jobs = [
        LoadTask(
            artifact=options.artifact,
            engine=options.engine,
            options=options.options,
            gpus=options.gpus,
            device=device,
            threads=options.threads,
            loads=options.loads,
            evaluation=options.evaluation,
            burst=options.burst,
            seed=options.seed,
            ceiling=limit,
            number=number,
        )
        for number in range(options.loads["restarts"])
    ]
    jobs[0].plan()  # refuses requests that cannot be sent before any server starts
    with work_folder(options.out):
        came = [start_server(job) for job in jobs]
    first, starts = came[0], [each.start for each in came]
    loads = [
        result.join([each.loads[place] for each in starts], starts[0].findings, options.loads["limits"])
        for place in range(len(starts[0].loads))
    ]
    arrays: dict[str, Any] = result.raw(starts)
    with write_atomically(options.out.with_suffix(".npz")) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    config = options.artifact / "config.json"
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
            "kv_bytes_per_token": first.kv_bytes_per_token,
            "mixture": config.is_file() and is_mixture(of_text(shards.read_config(config))),
            "loads": loads,
            "goodput": result.goodput(starts[0]),
            "client_ceiling": limit,
            "compute_type": first.compute_type,
            "versions": first.versions,
            "device": devices.describe(device, first.threads or options.threads),
        },
    )
