"""llamafile, at the URL where somebody runs it; or llama.cpp's llama-server, which it holds.

    llamafile --server -m FOLDER/model.gguf --port 8080 --metrics

It takes and tells ids. https://github.com/mozilla-ai/llamafile
"""

from typing import ClassVar

from quantmill.engines.served.attached import Attached


class Engine(Attached):
    """See `serving.attached.Attached`."""

    dialect = "llama"
    version = ("/props", "build_info")
    counted: ClassVar = {
        "prompt_tokens": "llamacpp:prompt_tokens_total",
        "generated_tokens": "llamacpp:tokens_predicted_total",
    }
