"""vLLM's server, asked over HTTP with token ids."""

import importlib.metadata
import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import engines
from checkpoint import shards
from common.program import UserError
from serving.client import Unreachable, get
from serving.engine import MODEL, Served, flags, python

TOP = 20  # likeliest tokens of each place
# nothing is reported to anybody; a window of the whole context can be scored; on a CPU the cache takes 1 GiB, not all
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
REFUSED = {"model", "host", "port", "trust_remote_code", "served_model_name", "api_key", "max_logprobs"}


class Engine(Served):
    """See `serving.engine.Served`."""

    options: ClassVar = None
    capabilities = Served.capabilities | {"target_logprobs"}

    def command(
        self, artifact: Path, device: str, threads: int, port: int, options: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        if wrong := sorted(REFUSED & options.keys()):
            raise UserError(f"engine vllm-serve: option {wrong[0]!r} is Quantmill's own affair; leave it out")
        self.compute_type = str(options.get("dtype", "auto"))
        context = shards.read_json(artifact / "config.json").get("max_position_embeddings")
        settings: dict[str, Any] = {"enable_prefix_caching": False, "seed": 0, "enable_log_requests": False}
        if isinstance(context, int):
            settings["max_model_len"] = context + 1
        argv = [*python(), "-m", "vllm.entrypoints.openai.api_server", f"--model={artifact.absolute()}"]
        argv += [f"--served-model-name={MODEL}", "--host=127.0.0.1", f"--port={port}", f"--max-logprobs={TOP}"]
        environment = ENVIRONMENT | ({"VLLM_CPU_KVCACHE_SPACE": "1"} if device == "cpu" else {})
        return [*argv, "--disable-uvicorn-access-log", *flags(settings | options)], environment

    def more(self, n: int) -> dict[str, Any]:
        return {"min_tokens": n, "stop_token_ids": self.stop_ids, "ignore_eos": False}

    def target_logprobs(self, ids: list[int]) -> engines.Targets:
        body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": TOP}
        answer = urllib.request.Request(
            f"{self.target.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(answer, timeout=self.target.timeout) as response:
            places = json.load(response)["choices"][0]["prompt_logprobs"][1:]
        found, top_ids, top = [], [], []
        for token, place in zip(ids[1:], places, strict=True):
            found.append(place[str(token)]["logprob"])
            likeliest = sorted(place.items(), key=lambda each: each[1]["rank"])[:TOP]
            top_ids.append([int(name) for name, _ in likeliest])
            top.append([each["logprob"] for _, each in likeliest])
        return engines.Targets(np.array(found), np.array(top_ids), np.array(top))

    def weight_bytes(self) -> int | None:
        return shards.bytes_per_token(self.artifact)

    def versions(self) -> dict[str, str]:
        try:
            said = json.loads(get(self.target, "/version"))["version"]
        except (Unreachable, ValueError, KeyError):
            said = "unknown"
        return {
            "vllm": said,
            "torch": importlib.metadata.version("torch"),
            "arguments": self.arguments,
        }
