"""text-generation-webui's API. Its usage counts the tokens of its text again, which may be a few more or fewer than it
decoded."""

from quantmill.client import stream
from quantmill.engines import attached


class Engine(attached.Engine):
    """See `engines.attached`."""

    def spread(self, reply: stream.Reply, n: int) -> None:
        told = reply.usage.new_tokens
        if told is not None and abs(told - n) <= max(2, n // 10):
            reply.usage, reply.finish = reply.usage._replace(new_tokens=n), "length"
        super().spread(reply, n)
