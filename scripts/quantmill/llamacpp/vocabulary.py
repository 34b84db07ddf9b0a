"""The pre-tokenizer of llama.cpp that fits a model, proved: it must make the tokenizer's ids of a text."""

import ctypes
import json
from pathlib import Path

from quantmill import llamacpp
from quantmill.checkpoint import gguf_file
from quantmill.common.program import UserError

# Byte-level BPEs that cover most models, the commonest first; each is tried until one is proved
COMMON = ("gpt-2", "llama-bpe", "qwen2", "smollm", "gpt-4o", "tekken", "deepseek-llm", "deepseek-v3", "falcon", "olmo")
PRE = "tokenizer.ggml.pre"
NONE = "none"  # instead: a file without a tokenizer, for random weights


def candidates(tokenizer: Path) -> list[str]:
    """List the names to try for a tokenizer.json, the likeliest first."""
    content = json.loads(tokenizer.read_text(encoding="utf-8")) if tokenizer.exists() else {}
    steps = content.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    patterns = " ".join(str(step.get("pattern")) for step in steps)
    likely = []
    if "Digits" in kinds:
        likely.append("smollm")
    elif "\\\\p{N}{1,3}" in patterns or "\\p{N}{1,3}" in patterns:
        likely.append("llama-bpe")
    elif "Split" in kinds:
        likely.append("qwen2")
    return list(dict.fromkeys([*likely, *COMMON]))


def prove(file: Path, text: str, ids: list[int], names: list[str]) -> str | None:
    """Return the first of `names` with which llama.cpp makes `ids` of `text`, or None if the file's name does already.

    file: a GGUF with the vocabulary. Names override the one in the file, which is not changed. Raises `UserError` with
    the first wrong token if no name fits.
    """
    own = gguf_file.read_all(file).metadata.get(PRE)
    found = tokenize(file, text, None)
    if found == ids:
        return None
    for name in names:
        if name != own and tokenize(file, text, name) == ids:
            return name
    place = next((each for each, pair in enumerate(zip(found, ids, strict=False)) if pair[0] != pair[1]), len(ids))
    raise UserError(
        f"{file.name}: llama.cpp's tokenizer makes other ids than the model's own, from token {place} of "
        f"{len(ids)} on ({found[place : place + 3]}, not {ids[place : place + 3]}), so that it cannot be served; "
        "leave the formats gguf-* out for this model"
    )


def tokenize(file: Path, text: str, pre: str | None) -> list[int]:
    """Tokenize a text with llama.cpp and a file's vocabulary, with the special tokens that the file asks for.

    pre: a pre-tokenizer instead of the file's. Raises `UserError` if the vocabulary does not load.
    """
    lib = llamacpp.binding()
    quiet = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    parameters = lib.llama_model_default_params()
    parameters.vocab_only = True
    if pre:
        overrides = (lib.llama_model_kv_override * 2)()  # the second, empty, ends the list
        overrides[0].tag = lib.LLAMA_KV_OVERRIDE_TYPE_STR
        overrides[0].key, overrides[0].value.val_str = PRE.encode(), pre.encode()
        parameters.kv_overrides = overrides
    model = lib.llama_model_load_from_file(str(file).encode(), parameters)
    if not model:
        raise UserError(f"{file}: llama.cpp cannot load its vocabulary")
    try:
        vocabulary = lib.llama_model_get_vocab(model)
        raw = text.encode()
        room = (lib.llama_token * (len(raw) + 8))()
        count = lib.llama_tokenize(vocabulary, raw, len(raw), room, len(room), True, False)
        return list(room[:count])
    finally:
        lib.llama_model_free(model)
