"""Convert a checkpoint to CTranslate2.

    python scripts/quantmill build.ct2 SRC DST --parameters '{"quantization": "int8"}'

The quantization has CTranslate2's name. The converter holds about 1.5 times the float16 weights
plus half a gigabyte, so a machine with less free memory is refused before any work.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ctranslate2
import numpy as np
import psutil
import torch
from ctranslate2.converters import TransformersConverter
from ctranslate2.specs.attention_spec import RotaryScalingType

from quantmill.build import check_parameters, finish, parser
from quantmill.checkpoint import ctranslate2_bin, ctranslate2_model, shards
from quantmill.common import manifest, remote_code, special_tokens, tokenizer
from quantmill.common.atomic import write_atomically
from quantmill.common.program import UserError, first_line

TORCH = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}  # what the converter reads
SWISH_ALONE = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # whose loaders read no hidden_act
QUANTIZATIONS = ["int8", "int8_float32", "int8_float16", "int8_bfloat16", "float16", "bfloat16", "float32"]


class Converter(TransformersConverter):
    """CTranslate2's converter, without what it silently drops or gets wrong (docs/FOOTGUNS.md)."""

    def load_model(self, model_class: Any, path: str, **options: Any) -> Any:
        """Load the model in its weights' dtype, with rotary parameters in transformers 4's words, as loaders want."""
        check_support(options["config"].get_text_config())
        tensors = shards.find(Path(path)).tensors().values()
        options["dtype"] = next((TORCH[tensor.dtype] for tensor in tensors if tensor.dtype in TORCH), torch.float32)
        self.model = super().load_model(model_class, path, **options)
        self.rope = older_words(self.model.config.get_text_config())
        older_modules(self.model, self.rope)
        return self.model

    def load_tokenizer(self, tokenizer_class: Any, path: str, **options: Any) -> Any:
        self.tokenizer = tokenizer.follow(super().load_tokenizer(tokenizer_class, path, **options), Path(path))
        return self.tokenizer

    def _load(self) -> Any:
        spec = super()._load()
        config = self.model.config.get_text_config()
        for name in ("bos_token", "eos_token", "unk_token"):  # null: the result cannot be loaded
            if vars(spec.config).get(name, "") is None:
                setattr(spec.config, name, "")
        if epsilon := getattr(config, "rms_norm_eps", None):
            spec.config.layer_norm_epsilon = epsilon
        named = {number: token for token, number in self.tokenizer.get_vocab().items()}
        # tokens are found by place, so one is made up where the tokenizer has none
        spec.register_vocabulary([named.get(number, f"<extra_id_{number}>") for number in range(config.vocab_size)])
        for layer in spec.decoder.layer:
            complete_attention(layer.self_attention, config, self.rope)
        return spec


def older_words(config: Any) -> dict[str, Any]:
    """Add a config's rotary parameters in transformers 4's words. Return those that all layers share.

    Without them loaders fall back to a base of 10,000, and Phi-3's loader does not scale rotary embeddings.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rope:  # Gemma 3: a base for each kind of layer
        config.rope_theta = rope["full_attention"]["rope_theta"]
        config.rope_local_base_freq = rope["sliding_attention"]["rope_theta"]
        return {}
    if "rope_theta" in rope:
        config.rope_theta = rope["rope_theta"]
        config.rotary_pct = config.partial_rotary_factor = rope.get("partial_rotary_factor", 1.0)
        scaled = rope["rope_type"] != "default"
        config.rope_parameters = rope | {"type": rope["rope_type"]} if scaled else None
    return rope


def older_modules(model: Any, rope: dict[str, Any]) -> None:
    """Put parts of a model where transformers 4 had them and loaders look for them."""
    if model.config.model_type == "phi3":
        factors = {name: rope.get(name) for name in ("long_factor", "short_factor")}
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = SimpleNamespace(**factors)
    if model.config.model_type == "gpt_neox":
        model.embed_out = model.get_output_embeddings()


def check_support(config: Any) -> None:
    """Raise ValueError with the name of a model's feature that CTranslate2 silently leaves out."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            raise ValueError(f"it has no {name}")
    if config.model_type in SWISH_ALONE and config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"its {config.model_type} has no hidden_act {config.hidden_act}, only silu")


def complete_attention(attention: Any, config: Any, rope: dict[str, Any]) -> None:
    """Add to a layer's attention what the engine reads and its loader leaves out: the head size, the queries' scale,
    and the numbers of llama3's scaling, without which nothing is scaled."""
    added: dict[str, Any] = {}
    head_dim = getattr(config, "head_dim", None)
    if head_dim and hasattr(attention, "rotary_dim"):
        added["head_dim"] = np.int32(head_dim)
    partial = rope.get("partial_rotary_factor", 1)
    if partial != 1 and getattr(attention, "rotary_dim", None) == 0:
        added["rotary_dim"] = np.int32((head_dim or config.hidden_size // config.num_attention_heads) * partial)
    if scalar := getattr(config, "query_pre_attn_scalar", None):
        added["queries_scale"] = np.float32(scalar**-0.5)
    if getattr(attention, "rotary_scaling_type", None) == RotaryScalingType.Llama3:
        added["rotary_scaling_factor"] = np.float32(rope["factor"])
        added["original_max_position_embeddings"] = np.int32(rope["original_max_position_embeddings"])
        added |= {f"rotary_{name}": np.float32(rope[name]) for name in ("low_freq_factor", "high_freq_factor")}
    vars(attention).update(added)  # its setattr refuses unknown names


def check_memory(source: shards.Checkpoint, quantization: str) -> None:
    """Raise `UserError` where memory is too short for the conversion (measured: 1.5 x float16 size + 0.5 GB)."""
    float16_bytes = sum(tensor.numel * 2 for tensor in source.tensors().values())
    need = int(float16_bytes * (3.0 if quantization == "float32" else 1.5)) + 500_000_000
    available = psutil.virtual_memory().available
    if need > available:
        raise UserError(
            f"{source.folder}: CTranslate2's converter needs about {need / 1e9:.1f} GB of memory and "
            f"{available / 1e9:.1f} GB are free; convert on a larger machine"
        )


def main() -> None:
    options = parser(__doc__).parse_args()
    parameters = check_parameters(options.parameters, ("quantization",))
    quantization = parameters["quantization"]
    if quantization not in QUANTIZATIONS:
        raise UserError(f"--parameters: quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")

    remote_code.forbid()
    source = shards.find(options.src)
    manifest.read_checked(options.src)
    check_memory(source, quantization)
    carried = [path for path in source.others() if path.name.startswith(("token", "special_tokens", "generation"))]
    with write_atomically(options.dst) as folder:
        converter = Converter(str(options.src))
        try:
            converter.convert(str(folder), quantization=quantization, force=True)
        except Exception as error:  # whatever transformers and CTranslate2 raise for models that they do not know
            raise UserError(f"{options.src}: CTranslate2 cannot convert it ({first_line(error)})") from None
        variables = ctranslate2_model.check(folder, source.config())
        for path in carried:
            shutil.copy(path, folder / path.name)
        ends, said = special_tokens.ends(source.config()), folder / "generation_config.json"
        if len(ends) > 1 and not said.exists():  # CTranslate2's own config.json has room for one
            said.write_text(json.dumps({"eos_token_id": ends}) + "\n", encoding="utf-8")
        layout = options.layout if quantization.startswith("int8") else "source"
        finish(
            folder,
            options,
            layout,
            tool="ctranslate2",
            tool_version=ctranslate2.__version__,
            parameters=parameters,
            weight_files=["model.bin"],
            weight_bytes_per_token=ctranslate2_bin.bytes_per_token(variables),
        )
