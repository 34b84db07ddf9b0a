"""Text Generation Inference, at the URL where somebody runs it. Archived upstream in March 2026; 3.3.7 is the last.

    text-generation-launcher --model-id FOLDER --port 8080    with PREFIX_CACHING=0 in its environment

It takes text and tells ids. It has no way to ignore an end of sequence: an answer that ends early is refused.
https://huggingface.co/docs/text-generation-inference
"""

from typing import Any, ClassVar

from quantmill.engines.served.attached import Attached


class Engine(Attached):
    """See `serving.attached.Attached`."""

    dialect = "tgi"
    takes_ids = False
    models = "/info"
    version = ("/info", "version")
    cache_off = "start it with PREFIX_CACHING=0"
    counted: ClassVar = {
        "prompt_tokens": "tgi_request_input_length_sum",
        "generated_tokens": "tgi_request_generated_tokens_sum",
    }

    def names(self, answer: Any) -> list[Any]:
        return [answer["model_id"]]
