"""Hugging Face transformers' own server, asked over HTTP. It takes and returns text, without log-probabilities: quality
is that of the same artifact through the library.

Its API cannot ignore an end of sequence. A generation config in each request does it: the least number of new tokens is
the largest one. Other rooms ask for this class, so libraries of its environment are imported where they are used.
"""

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from quantmill.checkpoint import kv_layers, shards
from quantmill.client.dialects import Prompt
from quantmill.common.program import UserError
from quantmill.engines.served.started import Started, flags
from quantmill.metrics.footprint import VALUE_BYTES, Cache, Footprint


class Engine(Started):
    """See `served.started.Started`."""

    dialect = "bare"
    tells_ids = False
    ours: ClassVar = frozenset({"force_model", "host", "port", "device", "trust_remote_code", "model_timeout"})

    def command(
        self, artifact: Path, device: str, threads: int, port: int, options: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        from transformers import AutoTokenizer

        from quantmill.client.text_prompts import Texts
        from quantmill.common import remote_code

        self.texts, self.model = Texts(artifact), str(artifact.absolute())
        remote_code.forbid()
        self.reader = AutoTokenizer.from_pretrained(artifact)  # as the server does
        # float16 is many times slower on a CPU, where other engines calculate in float32
        settings = {"dtype": "float16" if device == "cuda" else "float32", **options}
        self.compute_type = str(settings["dtype"])
        argv = [sys.executable, "-P", "-m", "transformers.cli.transformers", "serve", self.model, "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--device", device, *flags(settings)]
        return argv, {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def prompt(self, ids: list[int]) -> Prompt:
        """Return the text of ids. Raises `UserError` where the server would not read it as tokenizer.json says."""
        from quantmill.common import tokenizer

        text = self.texts.text(ids)
        with tokenizer.limits(self.texts.file, len(text.encode())):
            read = list(self.reader(text).input_ids)
        if read != self.texts.encode(text):
            raise UserError(
                f"{self.texts.file}: transformers' server reads prompts by {type(self.reader).__name__}, as other "
                "tokens than this file says; remove its runs, or correct tokenizer_class in tokenizer_config.json"
            )
        return text

    def more(self, n: int) -> dict[str, Any]:
        wanted = {"min_new_tokens": n, "max_new_tokens": n, "do_sample": False, "eos_token_id": self.stop_ids or None}
        return {"generation_config": json.dumps(wanted)}

    def footprint(self) -> Footprint | None:
        if self.compute_type not in VALUE_BYTES or "quantization" in self.options:
            return None
        layers = kv_layers.of_config(self.text_config(), VALUE_BYTES[self.compute_type])
        nbytes = shards.bytes_held(self.artifact, VALUE_BYTES[self.compute_type])
        return Footprint(nbytes, Cache(layers, beyond=-1) if layers else None)

    def versions(self) -> dict[str, str]:
        names = ("transformers", "torch")
        return {name: importlib.metadata.version(name) for name in names} | {"arguments": self.arguments}
