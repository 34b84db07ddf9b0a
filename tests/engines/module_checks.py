"""Run in envs/torch: what engines put into a model, on small modules and models; facts that test_engines.py asserts."""

import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quantmill.checkpoint import share_read
from quantmill.engines import CannotDecode
from quantmill.engines.decoding import fused, merged
from quantmill.engines.decoding.attention import shared_heads
from quantmill.engines.decoding.merged import Part, merge
from quantmill.engines.decoding.static_cache import StaticDecode
from quantmill.gate.expected import round_inputs
from quantmill.layouts import step_round

SMALL = {"vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 0}
GROUPED = SMALL | {"intermediate_size": 96, "num_key_value_heads": 2}
CONFIGS = {
    "llama": GROUPED,
    "qwen3": GROUPED | {"head_dim": 32},
    "gemma2": GROUPED | {"sliding_window": 16},  # not every layer attends to all positions
    "gpt_neox": SMALL | {"intermediate_size": 96},  # its config names no key heads
    "falcon": SMALL,  # its attention asks for its own name
}
IDS = [5, 17, 3, 44, 8]
BLOCKS = {"attention": {"q": 128, "k": 64, "v": 64}, "padded": {"gate": 64, "up": 64}, "mlp": {"gate": 64, "up": 96}}


class Columns(torch.nn.Module):
    """A layer that keeps its outputs in the last dimension, as gptqmodel's Marlin does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.qweight = torch.nn.Parameter(torch.randn(inputs, outputs))
        self.register_buffer("scales", torch.rand(1, outputs))
        self.register_buffer("qzeros", torch.empty(0))
        self.register_buffer("bias", torch.randn(outputs))
        self.in_features, self.out_features = inputs, outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.qweight * self.scales) + self.bias


@contextmanager
def watch_joins(events: list[str]) -> Iterator[None]:
    """Note each group that is merged."""
    joins = {name: getattr(merged, name) for name in ("_join_rows", "_join_columns")}
    for name, join in joins.items():
        setattr(merged, name, lambda layers, join=join: events.append("merged") or join(layers))
    yield
    for name, join in joins.items():
        setattr(merged, name, join)


def check_merging(kind: type[torch.nn.Module]) -> dict[str, Any]:
    """Return whether merged layers give what they gave apart, for one input after another, what is left alone and held,
    and whether the first ones are gone before the next are merged."""
    model = torch.nn.ModuleDict()
    blocks = {
        "attention": {"q": 128, "k": 64, "v": 64},
        "padded": {"gate": 64, "up": 64},
        "mlp": {"gate": 64, "up": 96},
    }
    for block, widths in blocks.items():
        layers = {f"{name}_proj": kind(32, width) for name, width in widths.items()}
        model[block] = torch.nn.Module()
        for name, layer in layers.items():
            setattr(model[block], name, layer)
    if kind is Columns:
        model["padded"].up_proj._marlin_tile_padding = (32, 128)
    events: list[str] = []
    weakref.finalize(model["attention"].k_proj, events.append, "gone")
    inputs = torch.randn(2, 1, 5, 32)
    names = ("q_proj", "k_proj", "v_proj")
    with torch.inference_mode():
        apart = [[getattr(model["attention"], name)(x) for name in names] for x in inputs]
        with watch_joins(events):
            merge(model, kind)
        joined = [[getattr(model["attention"], name)(x) for name in reversed(names)][::-1] for x in inputs]
    pairs = [pair for before, after in zip(apart, joined, strict=True) for pair in zip(before, after, strict=True)]
    return {
        "same": all(torch.allclose(before, after, atol=1e-5) for before, after in pairs),
        "all_parts": all(isinstance(getattr(model["attention"], name), Part) for name in names),
        "padded_left": isinstance(model["padded"].up_proj, kind),
        "uneven_left": isinstance(model["mlp"].up_proj, kind),
        "events": events,
        "names": model["attention"].v_proj.merged.names,
        "held": len(model["attention"].v_proj.merged.outputs),
    }


def check_rounding() -> dict[str, float]:
    """Return how far logits of a model whose layers' inputs are rounded lie from those without rounding, and from
    those where a GPU's engine merged the layers first; its artifact names layers as the model does."""
    logits = {}
    for way in ("plain", "apart", "merged"):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **GROUPED)).eval()
        stored = {name for name, _ in model.named_modules() if name.endswith("_proj")}
        if way == "merged":
            merge(model, torch.nn.Linear)
        if way != "plain":
            round_inputs(model, lambda layer, x, stored=stored: step_round(x, 7) if layer in stored else x)
        with torch.inference_mode():
            logits[way] = model(torch.tensor([IDS])).logits
    return {way: float((logits[way] - logits["apart"]).abs().max()) for way in ("plain", "merged")}


def check_shared_heads() -> list[float]:
    """Return how far attention of query heads that share keys lies from transformers': for one position of a prompt and
    of three, each with a mask of its own, and for seven positions."""
    module = torch.nn.Module()
    module.num_key_value_groups = 4
    errors = []
    for batch, positions in ((1, 1), (3, 1), (1, 7)):
        query, key, value = (torch.randn(batch, *shape, 16) for shape in ((8, positions), (2, 32), (2, 32)))
        lengths = torch.arange(20, 20 + batch)[:, None, None, None]
        mask = torch.zeros(batch, 1, positions, 32).masked_fill_(torch.arange(32) > lengths, -torch.inf)
        one, two = (
            each(module, query, key, value, mask, scaling=0.3)[0] for each in (shared_heads, sdpa_attention_forward)
        )
        errors.append(float((one - two).abs().max()))
    return errors


def experts() -> dict[str, int]:
    """Elements of a mixture's weights, of its experts alone, and those that one token reads."""
    sizes = GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes))
    named = list(model.named_parameters())
    return {
        "all": sum(each.numel() for _, each in named),
        "read": sum(round(each.numel() * share_read(name, model.config.to_dict())) for name, each in named),
    }


def generate(model: PreTrainedModel) -> list[int]:
    """Return the tokens of transformers' own generate."""
    batch = torch.tensor([IDS])
    options = {"attention_mask": torch.ones_like(batch), "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    return model.generate(batch, max_new_tokens=20, **options)[0, len(IDS) :].tolist()


def static_decoding(model: PreTrainedModel) -> dict[str, Any]:
    """Return whether the engine decodes the model this way, its tokens, its logits and what is fused then."""
    if not StaticDecode.fits(model):
        return {"fits": False}
    expected, before = generate(model), model(torch.tensor([IDS])).logits
    static = StaticDecode(model, len(IDS) + 20, [], captured=False)
    found: dict[str, Any] = {"fits": True}
    found["tokens"] = [token for token, _ in static.tokens(IDS, 20)] == expected
    found["logits"] = float((model(torch.tensor([IDS])).logits - before).abs().max())
    try:
        StaticDecode(model, len(IDS) + 20, [], captured=True)
    except CannotDecode as error:
        found["refused"] = str(error)
    found["fused"] = fused.fuse(model)[1]
    return found


def fail_capture(_: StaticDecode) -> None:
    """Make a model's step wait for the host."""
    raise RuntimeError("operation not permitted when stream is capturing\nSearch for it")


StaticDecode._capture = fail_capture
fused._compile = lambda function: function  # the compiler is another matter: here it is what is replaced by what
torch.manual_seed(0)
results = {}
with torch.inference_mode():
    for kind, config in CONFIGS.items():
        results[kind] = static_decoding(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval())
both = {"Columns": check_merging(Columns), "Linear": check_merging(torch.nn.Linear)}
facts = {"static": results, "merging": both, "sharing": check_shared_heads(), "experts": experts()}
print(json.dumps(facts | {"rounding": check_rounding()}))
