"""TensorRT-LLM's server, at the URL where somebody runs it.

    trtllm-serve FOLDER --port 8000    with kv_cache_config: {enable_block_reuse: false} in its --config

It takes ids. It tells ids where it is asked not to make text of them, which is what Quantmill asks.
https://nvidia.github.io/TensorRT-LLM/commands/trtllm-serve/
"""

from typing import Any

from quantmill.engines.served.attached import Attached


class Engine(Attached):
    """See `serving.attached.Attached`."""

    dialect = "plain"  # a word that it does not know is refused
    version = ("/version", "version")
    cache_off = "start it with kv_cache_config: {enable_block_reuse: false} in its --config"

    def more(self, n: int) -> dict[str, Any]:
        return {"ignore_eos": True, "detokenize": False}
