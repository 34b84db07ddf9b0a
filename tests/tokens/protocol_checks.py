"""Run in envs/torch: perplexities by the protocols' own descriptions, and ours, as JSON for test_protocols.py.

    python tests/tokens/protocol_checks.py MODEL PLAIN.json PAGES.json...

The JSON files are tokenised texts; PAGES are scored by lm-eval-word alone, PLAIN by the other protocols.
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from quantmill import engines  # noqa: E402
from quantmill.metrics import divergence  # noqa: E402
from quantmill.quality import (  # noqa: E402
    measure,
    reference,
    teacher_forcing,
)

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
plain, *pages = map(Path, sys.argv[2:])
content = json.loads(plain.read_text())
ids, context = torch.tensor([content["ids"]]), content["context"]


@torch.inference_mode()
def losses(read: torch.Tensor, scored: int) -> list[float]:
    """NLL of the last `scored` tokens of [1, n] ids that are read at once."""
    logits = model(read, use_cache=False).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, read[0, 1:], reduction="none")[-scored:].tolist()


@torch.inference_mode()
def fixed_length(stride: int) -> tuple[float, int]:
    """ "Perplexity of fixed-length models": windows that move on by a stride, the model's own loss over new tokens."""
    total, count, before = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + context, ids.shape[1])
        read = ids[:, begin:end]
        labels = read.clone()
        labels[:, : -(end - before)] = -100
        scored = int((labels[:, 1:] != -100).sum())  # the model shifts labels by one
        total += model(read, labels=labels).loss.item() * scored
        count += scored
        before = end
        if end == ids.shape[1]:
            break
    return math.exp(total / count), count


def halves() -> tuple[float, int, float]:
    """Return llama-perplexity's output "PPL +/- error" for chunks of 512."""
    found: list[float] = []
    for chunk in ids[0].split(512):
        if len(chunk) == 512:
            read = chunk.clone()
            read[0] = content["bos_id"]
            found += losses(read[None], 512 - 512 // 2 - 1)
    mean = sum(found) / len(found)
    variance = sum(value * value for value in found) / len(found) - mean * mean
    return math.exp(mean), len(found), math.sqrt(variance / (len(found) - 1)) * math.exp(mean)


def whole_windows() -> tuple[float, int]:
    """Compute it like the GPTQ code: nsamples windows, the loss of each token except the first."""
    found = [loss for part in ids[0].split(context) if len(part) == context for loss in losses(part[None], context - 1)]
    return math.exp(sum(found) / len(found)), len(found)


def score(path: Path, protocol: str) -> dict[str, Any]:
    """Return the result of quality.measure for the model against itself."""
    text = teacher_forcing.read_text(path, protocol)
    with tempfile.TemporaryDirectory() as folder:
        return measure.summarise(measure.score_reference(engine, text, Path(folder, "kept"), "cpu"), text, protocol)


def tensors() -> float:
    """Compare tensors, as on a GPU, and arrays; return the greatest difference, relative to the greatest value.

    Values are relative, because sums of float32 are: their last bits are the processor's. The kept values are the same.
    """
    rng = np.random.default_rng(0)
    logits = np.concatenate([rng.normal(0, 30, (20, 500)), np.full((1, 500), -np.inf)]).astype(np.float32)
    logits[20, 3], logits[0, 3] = 5, -np.inf
    assert np.array_equal(reference.narrow(torch.from_numpy(logits)), reference.narrow(logits))
    candidate, kept = (rng.normal(0, 3, (20, 500)).astype(dtype).astype(np.float32) for dtype in ("f4", "f2"))
    targets = np.arange(20)
    arrays = divergence.measure(candidate, kept, targets)
    found = divergence.measure(torch.from_numpy(candidate), kept, targets, torch)
    return max(
        float(np.abs(found[name].numpy() * 1.0 - values).max() / np.abs(values * 1.0).max().clip(1))
        for name, values in arrays.items()
    )


engine = engines.load("transformers", Path(sys.argv[1]), "cpu", 1)
print(
    json.dumps(
        {
            "independent": {
                "gptq-2048": whole_windows(),
                "llamacpp-512": halves(),
                "hf-strided": fixed_length(context // 2),
            },
            "ours": {name: score(plain, name) for name in ("gptq-2048", "llamacpp-512", "hf-strided")},
            "tensors": tensors(),
            "pages": [score(path, "lm-eval-word") for path in pages],
        }
    )
)
