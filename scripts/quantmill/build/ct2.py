"""Convert a checkpoint to CTranslate2.

    python scripts/quantmill build.ct2 SRC DST --parameters '{"quantization": "int8"}'

The quantization has CTranslate2's name. CTranslate2's own loaders arrange the weights of each architecture. They get
deferred tensors, so that model.bin is written one tensor at a time; its bytes are those of CTranslate2's converter.
"""

import gc
import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from ctranslate2.specs.attention_spec import RotaryScalingType
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from quantmill.build import check_parameters, ct2_stream, deferred, finish, parser
from quantmill.checkpoint import ctranslate2_bin, ctranslate2_model, shards
from quantmill.checkpoint.tensor import Tensor
from quantmill.common import manifest, remote_code, special_tokens, tokenizer
from quantmill.common.atomic import write_atomically
from quantmill.common.program import UserError, first_line

TORCH = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}  # what the converter reads
SWISH_ALONE = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # whose loaders read no hidden_act
QUANTIZATIONS = ["int8", "int8_float32", "int8_float16", "int8_bfloat16", "float16", "bfloat16", "float32"]
# in the manifest, with CTranslate2's version
WRITTEN = "by Quantmill, in a stream, byte for byte as CTranslate2's converter writes the same specification"


class Converter(TransformersConverter):
    """CTranslate2's converter, without what it silently drops or gets wrong (docs/FOOTGUNS.md)."""

    def load(self) -> Any:
        """Return the specification, complete, with deferred tensors. Raises whatever transformers and CTranslate2 raise
        for a model that they do not know."""
        spec = self._load()
        spec.validate()
        return spec

    def convert(self, output_dir: str, vmap: None = None, quantization: str = "float32", force: bool = False) -> str:
        """Convert as CTranslate2's own method does."""
        save(self.load(), Path(output_dir), quantization)
        return output_dir

    def load_model(self, model_class: Any, path: str, **options: Any) -> Any:
        """Load the model in its weights' dtype, with rotary parameters in transformers 4's words, as loaders want."""
        check_support(options["config"].get_text_config())
        tensors = shards.find(Path(path)).tensors()
        options["dtype"] = next((TORCH[each.dtype] for each in tensors.values() if each.dtype in TORCH), torch.float32)
        self.model = self.load_weights(model_class, tensors, **options)
        self.rope = older_words(self.model.config.get_text_config())
        older_modules(self.model, self.rope)
        return self.model

    def load_weights(self, model_class: Any, tensors: Mapping[str, Tensor], **options: Any) -> Any:
        """Return the model of deferred tensors. Raises ValueError for a weight that the checkpoint lacks, which
        transformers would make up."""
        if model_class is AutoModelForCausalLM:  # it wants a path
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(options["config"])]
        weights = {name: deferred.of(tensor) for name, tensor in tensors.items()}
        model, found = model_class.from_pretrained(None, state_dict=weights, output_loading_info=True, **options)
        if found["missing_keys"]:
            raise ValueError(f"its checkpoint lacks {min(found['missing_keys'])}")
        return model

    def load_tokenizer(self, tokenizer_class: Any, path: str, **options: Any) -> Any:
        self.tokenizer = tokenizer.follow(super().load_tokenizer(tokenizer_class, path, **options), Path(path))
        return self.tokenizer

    def _load(self) -> Any:
        gc.freeze()  # some loaders collect garbage after each layer: 0.2 s, for the libraries' objects alone
        spec = super()._load()
        gc.unfreeze()
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


def save(spec: Any, folder: Path, quantization: str) -> None:
    """Write all files of a model to a new folder."""
    folder.mkdir()
    spec._serialize = partial(ct2_stream.write, spec=spec, quantization=quantization)
    spec.save(str(folder))


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


def main() -> None:
    options = parser(__doc__).parse_args()
    parameters = check_parameters(options.parameters, ("quantization",))
    quantization = parameters["quantization"]
    if quantization not in QUANTIZATIONS:
        raise UserError(f"--parameters: quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")

    remote_code.forbid()
    source = shards.find(options.src)
    manifest.read_checked(options.src)
    carried = [path for path in source.others() if path.name.startswith(("token", "special_tokens", "generation"))]
    with write_atomically(options.dst) as folder:
        try:
            spec = Converter(str(options.src)).load()
        except Exception as error:
            raise UserError(f"{options.src}: CTranslate2 cannot convert it ({first_line(error)})") from None
        torch.set_num_threads(1)  # blocks are too small to be shared
        save(spec, folder, quantization)
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
            written=WRITTEN,
            parameters=parameters,
            weight_files=["model.bin"],
            weight_bytes_per_token=ctranslate2_bin.bytes_per_token(variables),
        )
