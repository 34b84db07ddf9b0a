"""LMDeploy's server, at the URL where somebody runs it; its own API, which takes and tells ids.

    lmdeploy serve api_server FOLDER --server-port 23333 --enable-metrics

Its cache of prompts is off unless --enable-prefix-caching is given. It tells its version nowhere.
https://lmdeploy.readthedocs.io/en/latest/llm/api_server.html
"""

from typing import ClassVar

from quantmill.engines.served.attached import Attached


class Engine(Attached):
    """See `serving.attached.Attached`."""

    dialect = "lmdeploy"
    cache_off = "start it without --enable-prefix-caching"
    counted: ClassVar = {
        "prompt_tokens": "lmdeploy:prompt_tokens_total",
        "generated_tokens": "lmdeploy:generation_tokens_total",
        "drafted": "lmdeploy:spec_decode_num_draft_tokens_total",
        "accepted": "lmdeploy:spec_decode_num_accepted_tokens_total",
    }
