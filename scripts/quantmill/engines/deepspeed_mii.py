"""DeepSpeed-MII's server like OpenAI's, at the URL where somebody runs it.

    python -m mii.entrypoints.openai_api_server --model FOLDER --port 8000

It takes and tells text, and no usage. It always samples: here of one likeliest token, so greedily.
https://github.com/deepspeedai/DeepSpeed-MII
"""

from typing import Any

from quantmill.engines.served.attached import Attached

EVERY = 1_000_000  # tokens, more than any context


class Engine(Attached):
    """See `serving.attached.Attached`."""

    dialect = "plain"
    takes_ids = tells_ids = False

    def more(self, n: int) -> dict[str, Any]:
        # of min_tokens it counts the prompt too; an end of sequence before them is ignored
        return {"temperature": 1.0, "top_k": 1, "min_tokens": EVERY}
