"""ollama, at the URL where somebody runs it; its own API, since the one like OpenAI's writes a chat's template around.

    ollama create NAME -f Modelfile    with a line FROM FOLDER/model.gguf

It takes and tells text, cannot ignore an end of sequence, and keeps prompts: what TTFT means depends on that.
https://docs.ollama.com/api/generate
"""

from quantmill.engines.served.attached import Attached


class Engine(Attached):
    """See `serving.attached.Attached`."""

    dialect = "ollama"
    takes_ids = tells_ids = False
    health = "/api/version"
    version = ("/api/version", "version")
