"""Anything that answers OpenAI's completions, at the URL where somebody runs it: servers without a module of their own.

What it takes is tried: ids and the words of vLLM's API, then text with these words, then text and OpenAI's words alone.
With these a model that chooses an end of sequence ends early, which is refused. vLLM's own server tells everything,
the probabilities of a given text too.
https://platform.openai.com/docs/api-reference/completions
"""

import sys

from common.program import UserError
from serving import lifecycle
from serving.attached import Attached
from serving.engine import NotTold

WAYS = (("completions", True, True), ("completions", True, False), ("extended", False, False), ("plain", False, False))


class Engine(Attached):
    """See `serving.attached.Attached`."""

    version = ("/version", "version")

    def probe(self, number: int = 0) -> None:
        for number, (self.dialect, self.takes_ids, self.tells_ids) in enumerate(WAYS):
            try:
                super().probe(number)
                break
            except UserError as error:
                reason = error  # of the last: of what every server takes
        else:
            raise reason
        if self.tells_ids and self.tells_likelihood():
            self.capabilities = Attached.capabilities | {"target_logprobs"}

    def tells_likelihood(self) -> bool:
        """Whether it tells the probabilities of a given text, as vLLM's server does; its log says why not."""
        try:
            self.target_logprobs(list(range(2, 10)))
        except NotTold as error:
            print(f"no quality: {error}", file=sys.stderr)
            return False
        return True

    def check(self) -> None:
        try:
            lifecycle.attach(self.target, "/health")
        except UserError:  # not every server has it
            lifecycle.attach(self.target, self.models)
