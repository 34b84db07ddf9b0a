"""Run in envs/torch with the artifacts of the demo: each line printed is a fact that test_engines.py asserts."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from ctranslate2.converters import TransformersConverter  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from quantmill import engines  # noqa: E402
from quantmill.common.program import UserError  # noqa: E402
from quantmill.engines.decoding import static_cache  # noqa: E402
from quantmill.engines.decoding.merged import Merged  # noqa: E402

artifacts = Path(sys.argv[1])
ids = json.loads((artifacts / "tokens/prompts.json").read_text())["prompts"][3]["ids"]
model = AutoModelForCausalLM.from_pretrained(artifacts / "fp16", dtype=torch.float32)
with torch.inference_mode():
    batch = torch.tensor([ids])
    # the mask is given because generate takes <s>, id 0, for padding otherwise
    options = {"attention_mask": torch.ones_like(batch), "pad_token_id": 0, "do_sample": False}
    expected = model.generate(batch, max_new_tokens=60, min_new_tokens=60, **options)
    expected = expected[0, len(ids) :].tolist()
    logits = model(batch).logits[0].numpy()
# as a publisher's may: an engine that takes its word decodes other tokens
words = {"do_sample": True, "temperature": 2.0, "repetition_penalty": 5.0}
(artifacts / "fp16/generation_config.json").write_text(json.dumps(words))
head, table = model.lm_head.weight, model.model.embed_tokens.weight

facts: dict[str, Any] = {}
for name, engine_name in (("fp16", "transformers"), ("ct2-float32", "ctranslate2"), ("ct2-int8", "ctranslate2")):
    engine, rounds = engines.load(engine_name, artifacts / name, "cpu", 1), []
    for _ in range(3):  # another program may hold up one answer, but not all
        _, tokens, times = zip(*engine.decode([ids], 60), strict=True)
        rounds.append(np.diff(times))
    batch = [ids[:8], ids[1:9], ids[2:10]]
    came = list(engine.decode(batch, 20))
    together = [[token for number, token, _ in came if number == place] for place in range(len(batch))]
    alone = [[token for _, token, _ in engine.decode([each], 20)] for each in batch]
    engines.CHUNK_LOGITS = 16 * 2048  # small chunks, so that their seams are crossed
    parts = [chunk.copy() for chunk in engine.logits(ids)]
    facts[name] = {
        "tokens_equal": list(tokens) == expected,
        "count": len(tokens),
        "layers": model.config.num_hidden_layers,
        "batch_equal": together == alone,
        "evenness": max(float(np.quantile(gaps, 0.05) / np.median(gaps)) for gaps in rounds),
        "chunks": [len(part) for part in parts],
        "logits_error": float(np.abs(np.concatenate(parts) - logits).max()),
        "dtype": str(parts[0].dtype),
        "weight_bytes": engine.weight_bytes(),
        "compute_type": engine.compute_type,
        "versions": engine.versions(),
    }
    if name == "fp16":
        # the recorded step's arithmetic; to record it is a GPU's
        static_cache.StaticDecode = partial(static_cache.StaticDecode, captured=False)
        engine.mode = "captured"
        for prompt in (list(range(20, 90)), ids):  # what the first leaves in the cache must not show in the second
            static_tokens = [token for _, token, _ in engine.decode([prompt], 60)]
        facts[name]["static_tokens_equal"] = static_tokens == expected
        facts[name]["merged"] = sum(isinstance(each, Merged) for each in engine.model.modules())
    engine.close()

with torch.inference_mode():
    head[1] = 50 * head[expected[0]]  # </s> now wins at the first step
rigged = artifacts / "rigged"
model.save_pretrained(rigged)
for file in (artifacts / "fp16").glob("token*"):
    shutil.copy(file, rigged)
TransformersConverter(str(rigged)).convert(str(artifacts / "rigged-ct2"))
facts["rigged"] = [
    [token for _, token, _ in engines.load(name, artifacts / folder, "cpu", 1).decode([ids], 20)]
    for name, folder in (("transformers", "rigged"), ("ctranslate2", "rigged-ct2"))
]
facts["options"] = {
    name: engines.load(name, artifacts / folder, "cpu", 1, **options).compute_type
    for name, folder, options in (
        ("transformers", "fp16", {"dtype": "bfloat16", "attn_implementation": "eager"}),
        ("ctranslate2", "ct2-float32", {"compute_type": "int8"}),
    )
}
facts["refused"] = []
for name, folder, options in (
    ("transformers", "fp16", {"dtype": "float61"}),
    ("ctranslate2", "ct2-int8", {"compute_type": "int3"}),
):
    try:
        engines.load(name, artifacts / folder, "cpu", 1, **options)
    except UserError as error:
        facts["refused"].append(str(error))
facts["linear_float32_bytes"] = 4 * (model.num_parameters() - table.numel())
print(json.dumps(facts))
