"""Any server with OpenAI's completions API that has no entry of its own in `served.attached_servers`.

Its ways of asking are tried in order: ids with the fields of vLLM's API, text with these fields, text with OpenAI's
fields alone. With the last, a model that chooses an end of sequence ends early, which is refused. vLLM's own server
reports everything, including the log-probabilities of a given text.
https://platform.openai.com/docs/api-reference/completions
"""

import sys
from collections.abc import Sequence

from quantmill.client import stream
from quantmill.common.program import UserError
from quantmill.engines import attached
from quantmill.engines.served.served import Contradiction, NotTold, Objection
from quantmill.servers import lifecycle

WAYS = (("completions", True, True), ("completions", True, False), ("extended", False, False), ("plain", False, False))


class Engine(attached.Engine):
    """See `engines.attached`."""

    def probe(self, number: int = 0) -> None:
        objection: Objection | None = None
        for number, (self.dialect, self.takes_ids, self.tells_ids) in enumerate(WAYS):
            try:
                super().probe(number)
                break
            except Contradiction:  # another way would report less, and hide it
                raise
            except UserError as error:
                reason = error  # of the last way, which every server supports
                objection = objection or (error if isinstance(error, Objection) else None)
        else:
            raise reason
        if objection:
            raise objection
        if not self.tells_ids:
            self.prove_tokenizer(number)
        if self.tells_ids and self.tells_likelihood():
            self.capabilities |= {"target_logprobs"}

    def prove_tokenizer(self, number: int) -> None:
        """Check that a server without ids reads as many tokens of a text as the artifact's tokenizer. Raises
        `UserError` where it reports no number, or another one."""
        takes_ids, self.takes_ids = self.takes_ids, False
        if takes_ids:  # a prompt of ids proves nothing
            super().probe(number + 1)
        self.takes_ids = takes_ids
        if not self.counts:
            raise Contradiction(
                f"{self.where()}: it returns neither ids nor the number of tokens that it reads and writes (usage), "
                "so nothing shows that it has this artifact's tokenizer; use a server that does"
            )

    def ask(self, prompts: Sequence[list[int]], n: int) -> list[stream.Reply]:
        replies = super().ask(prompts, n)
        self.counts = all(None not in (each.usage.prompt_tokens, each.usage.new_tokens) for each in replies)
        return replies

    def tells_likelihood(self) -> bool:
        """Return whether it reports the log-probabilities of a given text, as vLLM's server does; the log says why
        not."""
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
            lifecycle.attach(self.target, self.server.models)
