"""MLC-LLM's server, at the URL where somebody runs it.

    mlc_llm serve FOLDER --model-lib LIBRARY.so --port 8000 --enable-debug

It takes ids and tells text. Without --enable-debug it does not ignore an end of sequence. https://llm.mlc.ai/docs/
"""

from typing import Any

from quantmill.engines.served.attached import Attached


class Engine(Attached):
    """See `serving.attached.Attached`."""

    dialect = "plain"
    tells_ids = False
    health = "/v1/models"
    cache_off = "start it with --prefix-cache-mode disable"

    def more(self, n: int) -> dict[str, Any]:
        return {"debug_config": {"ignore_eos": True}}
