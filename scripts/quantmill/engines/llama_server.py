"""llama.cpp's server, asked over HTTP with token ids. It does not report the log-probabilities of a prompt: quality is
that of the same artifact through the library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from quantmill import llamacpp
from quantmill.checkpoint import ggml_types, gguf_file
from quantmill.engines.served.attached_servers import LLAMA_COUNTERS
from quantmill.engines.served.started import MODEL, Deployable, flags, pin
from quantmill.llamacpp import cells, files
from quantmill.metrics.footprint import Cache, Footprint
from quantmill.servers import lifecycle
from quantmill.servers.endpoint import Endpoint

TYPES = {each.name.lower(): number for number, each in ggml_types.TYPES.items()}
DRAFTS = ("model_draft", "md", "spec", "draft")  # beginnings of options for a second model


class Engine(Deployable):
    """See `served.started.Started`."""

    package, program = "llama.cpp", "llama-server"
    dialect = "llama"
    counted = LLAMA_COUNTERS
    ours: ClassVar = frozenset(
        {"model", "m", "model_url", "mu", "hf_repo", "hf", "hfr", "hf_file", "hff", "host", "port", "api_key"}
        | {"api_key_file", "alias", "a", "log_file", "path", "api_prefix", "threads", "t"}
    )

    def command(
        self, artifact: Path, device: str, threads: int, port: int, options: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, str]]:
        self.compute_type = files.compute_type(gguf_file.read_all(files.first(artifact)))
        if options.get("parallel", 1) > 1:
            self.capabilities = self.capabilities | {"batches"}
        self.context = options.get("ctx_size", options.get("c", 0))
        self.types = [str(options.get(f"cache_type_{part}", options.get(f"ct{part}", "f16"))) for part in "kv"]
        place = Endpoint(str(artifact.absolute()), MODEL, lifecycle.LOCAL, port)
        words = self.words(artifact, place, int(device == "cuda"), threads, options)
        return [str(llamacpp.folder() / "bin/llama-server"), *words], {}

    @staticmethod
    def words(artifact: Path, place: Endpoint, cards: int, threads: int, options: Mapping[str, Any]) -> list[str]:
        settings = dict[str, Any](threads=threads, parallel=1, cache_prompt=False, webui=False, metrics=True)
        if options.get("parallel", 1) > 1:
            settings["kv_unified"] = True  # as by its own number of slots: each may use the whole context
        settings |= options
        settings |= {"n_gpu_layers": 999} if cards else {"device": "none"}
        argv = ["--model", f"{place.folder}/{files.first(artifact).name}", "--alias", place.name]
        return [*argv, "--host", place.host, "--port", str(place.port), *flags(settings)]

    @staticmethod
    def env(cards: int) -> str:
        return "llama_cpp"

    @classmethod
    def image(cls, recorded: str | None, cards: int) -> tuple[str, str]:
        """Return the newest image: images are tagged by llama.cpp's build number, which the binding's sources do not
        name."""
        package = "llama-cpp-python"
        sources = recorded or f"{package}-{pin(f'{package}.sdist', package)}"
        tag = "server-cuda" if cards else "server"
        about = f"llama.cpp, compiled here from the sources of {sources}; the image {tag} is llama.cpp's newest build"
        return f"ghcr.io/ggml-org/llama.cpp:{tag}", f"{about}: for one close to it, use {tag}-bNUMBER"

    @staticmethod
    def program_here(python: str) -> str:
        return str(llamacpp.place() / "bin/llama-server")

    def shared_context(self, context: int | None) -> int | None:
        # all slots share one cache (kv_unified), which says "Context size has been exceeded" when full; 0: the model's
        return int(self.context) or context if str(self.context).isdecimal() else None

    def footprint(self) -> Footprint | None:
        options = self.options
        if any(name.startswith(DRAFTS) for name in options) or not TYPES.keys() >= set(self.types):
            return None
        settings = {f"type_{part}": TYPES[each] for part, each in zip("kv", self.types, strict=True)}
        settings["flash_attn_type"] = cells.FLASH.get(str(options.get("flash_attn", options.get("fa"))), -1)
        for name, short in (("batch_size", "b"), ("ubatch_size", "ub")):
            if size := options.get(name, options.get(short)):
                settings[f"n_{name.removesuffix('_size')}"] = int(size)
        file = files.first(self.artifact)
        cache = None
        if found := cells.ask(file, settings):
            beyond = None if options.get("swa_full") else found.batch
            cache = Cache(found.layers, page=cells.PAGE, beyond=beyond, pooled=bool(options.get("kv_unified", True)))
        return Footprint(files.weight_bytes(gguf_file.read_all(file)), cache)

    def versions(self) -> dict[str, str]:
        cache = ", ".join(dict.fromkeys(self.types))
        return {"llama.cpp": llamacpp.build()["sources"], "kv cache": cache, "arguments": self.arguments}
