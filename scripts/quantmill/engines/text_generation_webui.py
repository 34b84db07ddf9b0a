"""text-generation-webui's API, at the URL where somebody runs it.

    python server.py --api --api-port 5000 --model NAME

It takes and tells text. Its usage counts the tokens of its text again, which may be some more or fewer than it decoded.
https://github.com/oobabooga/text-generation-webui/wiki/12-%E2%80%90-OpenAI-API
"""

from typing import Any

from quantmill.client import stream
from quantmill.engines.served.attached import Attached


class Engine(Attached):
    """See `serving.attached.Attached`."""

    dialect = "plain"
    takes_ids = tells_ids = False
    health = models = "/v1/internal/model/info"  # /v1/models lists what could be loaded, too

    def names(self, answer: Any) -> list[Any]:
        return [answer["model_name"]]

    def more(self, n: int) -> dict[str, Any]:
        return {"ban_eos_token": True, "do_sample": False}

    def spread(self, reply: stream.Reply, n: int) -> None:
        told = reply.usage.new_tokens if reply.usage else None
        if told is not None and abs(told - n) <= max(2, n // 10):
            reply.usage, reply.finish = reply.usage._replace(new_tokens=n), "length"
        super().spread(reply, n)
