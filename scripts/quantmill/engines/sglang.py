"""SGLang's server, at the URL where somebody runs it; its own API, which takes and tells ids.

    python -m sglang.launch_server --model-path FOLDER --port 30000 --disable-radix-cache --enable-metrics

https://docs.sglang.ai/basic_usage/native_api.html
"""

from typing import ClassVar

from quantmill.engines.served.attached import Attached


class Engine(Attached):
    """See `serving.attached.Attached`."""

    capabilities = Attached.capabilities | {"target_logprobs"}
    dialect = "sglang"
    version = ("/server_info", "version")
    cache_off = "start it with --disable-radix-cache"
    counted: ClassVar = {
        "prompt_tokens": "sglang:prompt_tokens_total",
        "generated_tokens": "sglang:generation_tokens_total",
        "cached_tokens": "sglang:cached_tokens_total",
    }
