"""The servers that their users run, as one table: how each is found and spoken to. docs/SERVING.md says how each
is started."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

IGNORE_EOS = {"ignore_eos": True}
LLAMA_COUNTERS = {
    "prompt_tokens": "llamacpp:prompt_tokens_total",
    "generated_tokens": "llamacpp:tokens_predicted_total",
}


@dataclass(frozen=True)
class AttachedServer:
    """A server's API and switches.

    Attributes:
        loads: the layouts that it loads; None for any.
        dialect: a key of `client.dialects.DIALECTS`.
        takes_ids, tells_ids: whether it takes and returns token ids; otherwise text.
        health: the path that answers 200 as soon as it is ready.
        models: the path that lists the names of its models, as OpenAI's API does; named: where it has one name instead,
            that name's key.
        version: path and key of its version; None where it does not report one.
        more: what each request says besides, so that no end-of-sequence token is chosen.
        cache_off: what its user does to switch its prompt cache off.
        counted: names of `client.checks.Counters` and of the metrics that hold them.
        likelihood: whether it returns the log-probabilities of a given text.
        recounts: whether its usage counts the tokens of its text again, a few more or fewer than it decoded.
        implementation: `attached`, or empty where a module of its own has a subclass of `attached.Engine`.
    """

    loads: tuple[str, ...] | None
    dialect: str = "completions"
    takes_ids: bool = True
    tells_ids: bool = True
    health: str = "/health"
    models: str = "/v1/models"
    named: str | None = None
    version: tuple[str, str] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    cache_off: str = "start it without a prompt cache"
    counted: Mapping[str, str] = field(default_factory=dict)
    likelihood: bool = False
    recounts: bool = False
    implementation: str = "attached"


SERVERS = {
    "openai": AttachedServer(None, version=("/version", "version"), implementation=""),
    "tgi": AttachedServer(
        ("hf", "gptq", "awq", "compressed-tensors"),
        dialect="tgi",
        takes_ids=False,
        models="/info",
        named="model_id",
        version=("/info", "version"),
        cache_off="start it with PREFIX_CACHING=0",
        counted={
            "prompt_tokens": "tgi_request_input_length_sum",
            "generated_tokens": "tgi_request_generated_tokens_sum",
        },
    ),
    "sglang": AttachedServer(
        ("hf", "gptq", "awq", "gguf", "compressed-tensors"),
        dialect="sglang",
        version=("/server_info", "version"),
        cache_off="start it with --disable-radix-cache",
        counted={
            "prompt_tokens": "sglang:prompt_tokens_total",
            "generated_tokens": "sglang:generation_tokens_total",
            "cached_tokens": "sglang:cached_tokens_total",
        },
        likelihood=True,
    ),
    "lmdeploy": AttachedServer(
        ("hf", "gptq", "awq"),
        dialect="lmdeploy",
        cache_off="start it without --enable-prefix-caching",
        counted={
            "prompt_tokens": "lmdeploy:prompt_tokens_total",
            "generated_tokens": "lmdeploy:generation_tokens_total",
            "drafted": "lmdeploy:spec_decode_num_draft_tokens_total",
            "accepted": "lmdeploy:spec_decode_num_accepted_tokens_total",
        },
    ),
    # It refuses words that it does not know.
    "tensorrt-llm": AttachedServer(
        ("hf", "awq"),
        dialect="plain",
        version=("/version", "version"),
        more=IGNORE_EOS | {"detokenize": False},  # it returns ids if it is asked not to make text
        cache_off="start it with kv_cache_config: {enable_block_reuse: false} in its --config",
    ),
    # Its own API: the one like OpenAI's applies a chat template. It cannot ignore an end of sequence, and it keeps
    # prompts: what TTFT means depends on that.
    "ollama": AttachedServer(
        ("gguf",),
        dialect="ollama",
        takes_ids=False,
        tells_ids=False,
        health="/api/version",
        version=("/api/version", "version"),
    ),
    "llamafile": AttachedServer(("gguf",), dialect="llama", version=("/props", "build_info"), counted=LLAMA_COUNTERS),
    "text-generation-webui": AttachedServer(
        ("hf", "gguf"),
        dialect="plain",
        takes_ids=False,
        tells_ids=False,
        health="/v1/internal/model/info",
        models="/v1/internal/model/info",  # /v1/models also lists what could be loaded
        named="model_name",
        more={"ban_eos_token": True, "do_sample": False},
        recounts=True,
    ),
    # It always samples, here of the one likeliest token. It counts the prompt as part of min_tokens, which is therefore
    # larger than any context, and ignores an end of sequence before.
    "deepspeed-mii": AttachedServer(
        ("hf",),
        dialect="plain",
        takes_ids=False,
        tells_ids=False,
        more={"temperature": 1.0, "top_k": 1, "min_tokens": 1_000_000},
    ),
    "mlc-serve": AttachedServer(
        ("mlc",),
        dialect="plain",
        tells_ids=False,
        health="/v1/models",
        more={"debug_config": IGNORE_EOS},
        cache_off="start it with --prefix-cache-mode disable",
    ),
    "openvino-model-server": AttachedServer(
        ("hf", "gguf"),
        dialect="openvino",
        takes_ids=False,
        tells_ids=False,
        health="/v2/health/ready",
        models="/v3/models",
        cache_off="start it with --enable_prefix_caching false",
    ),
}
