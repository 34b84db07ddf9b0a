"""llama.cpp's server, asked over HTTP with token ids. It tells no log-probabilities of a prompt: quality is that of the
same artifact through the library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import llamacpp
from checkpoint import gguf_file
from llamacpp import files
from serving.engine import Served, flags


class Engine(Served):
    """See `serving.engine.Served`."""

    options: ClassVar = None
    dialect = "llama"

    def command(
        self, artifact: Path, device: str, threads: int, port: int, options: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        self.file = files.first(artifact)
        self.compute_type = files.compute_type(gguf_file.read_all(self.file))
        settings = {"threads": threads, "parallel": 1, "cache_prompt": False, "webui": False} | dict(options)
        settings |= {"n_gpu_layers": 999} if device == "cuda" else {"device": "none"}
        argv = [str(llamacpp.folder() / "bin/llama-server"), "--model", str(self.file.absolute())]
        return [*argv, "--host", "127.0.0.1", "--port", str(port), *flags(settings)], {}

    def weight_bytes(self) -> int | None:
        return files.bytes_per_token(gguf_file.read_all(self.file))

    def versions(self) -> dict[str, str]:
        return {"llama.cpp": llamacpp.build()["sources"], "arguments": self.arguments}
