"""Check that CTranslate2 can run a model.bin: every variable's shape, type and count follow from the model's sizes.

The engine looks variables up by name and compares no shapes: with a layer norm of 255 instead of 256 it reads memory
outside the model. It also takes names that it creates itself (`weight_packed`) from the file. The rules here are those
of the decoder of CTranslate2 4 (specs/transformer_spec.py, specs/attention_spec.py).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmill.checkpoint import ctranslate2_bin, selection, shards
from quantmill.checkpoint.ctranslate2_bin import Variable
from quantmill.common.model_config import of_text
from quantmill.common.program import UserError

MODEL, CONFIG, VOCABULARY = "model.bin", "config.json", "vocabulary.json"
SPEC, REVISIONS = "TransformerDecoderSpec", range(2, 9)  # the first one had other names
INTEGERS, FLOATS = ("int8", "int16", "int32"), ("float32", "float16", "bfloat16")
LARGEST = 2**31 - 1
ACTIVATIONS, SCALING_TYPES = range(7), range(3)  # common_spec.Activation, attention_spec.RotaryScalingType
SU = 1  # the scaling type that reads a factor for each pair of dimensions
# the norms of a layer, in the four ways that the engine knows
PLAIN = {"self_attention/layer_norm", "ffn/layer_norm"}
PARALLEL = {"input_layer_norm", "post_attention_layer_norm"}
NORMS = (
    PLAIN,
    {"shared_layer_norm"},
    PARALLEL,
    {*PARALLEL, "pre_feedforward_layer_norm", "post_feedforward_layer_norm"},
)
# sizes, and their keys in config.json of several families
WORDS = {
    "vocabulary": ("vocab_size",),
    "width": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "heads of keys": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "inner width": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}


def check(folder: Path, config: Mapping[str, Any] | None = None) -> dict[str, Variable]:
    """Return the variables, by name, of an artifact that CTranslate2 can run.

    Args:
        config: config.json of the model that was converted; None: the sizes need only agree with one another.

    Raises `UserError` that names the first variable that is missing, unknown or contradicts the sizes, and for a
    config.json or vocabulary.json that does not fit.
    """
    path = folder / MODEL
    contents = ctranslate2_bin.read(path)
    if contents.spec != SPEC or contents.revision not in REVISIONS:
        said = f"{contents.spec!r:.80}, revision {contents.revision}"
        raise UserError(f"{path}: is a {said}, not a {SPEC} of CTranslate2 4; convert the model with that")
    if kind := shards.read_json(folder / CONFIG).get("quantization_type"):
        raise UserError(f"{folder / CONFIG}: quantization_type {kind!r:.20} is AWQ's, which Quantmill does not check")
    decoder = _Decoder(path, contents, of_text(config or {}))
    decoder.check()
    tokens = shards.read_list(folder / VOCABULARY, selection.MAX_BYTES)
    if len(tokens) != decoder.vocabulary:  # tokens are found by their place
        raise UserError(
            f"{folder / VOCABULARY}: has {len(tokens)} tokens, and {MODEL} has {decoder.vocabulary}; convert it again"
        )
    return contents.variables


class _Decoder:
    """A walk through all variables that takes each one once; those that remain are unknown to the engine."""

    def __init__(self, path: Path, contents: ctranslate2_bin.Contents, config: Mapping[str, Any]) -> None:
        self.path, self.config = path, config
        self.left = dict(contents.variables)
        for alias, target in contents.aliases.items():
            self.left[alias] = contents.variables[target]
            if (scale := f"{target}_scale") in contents.variables:  # the engine aliases the scale too
                self.left.setdefault(f"{alias}_scale", contents.variables[scale])
        self.scopes = {name.rpartition("/")[0] for name in self.left}
        self.vocabulary = 0

    def refuse(self, name: str, what: str) -> UserError:
        return UserError(f"{self.path}: decoder/{name!s:.120} {what}; convert the model again")

    def has(self, scope: str) -> bool:
        """Return whether this scope itself holds a variable."""
        return f"decoder/{scope}" in self.scopes

    def told(self, size: str, value: int, name: str) -> int:
        """Return a size that variable `name` has. Raises `UserError` if config.json names only others."""
        words = {word: self.config[word] for word in WORDS[size] if isinstance(self.config.get(word), int)}
        if words and value not in words.values():
            word, mine = next(iter(words.items()))
            raise self.refuse(name, f"makes the model's {size} {value}, and config.json's {word} is {mine}")
        return value

    def scalar(self, name: str, low: float, high: float, default: float | None = None, floats: bool = False) -> float:
        """Return a number from `low` to `high` that the engine reads; `default` is the engine's own if it is absent."""
        found = self.left.pop(f"decoder/{name}", None)
        if found is None:
            if default is None:
                raise self.refuse(name, "is missing")
            return default
        kinds = (*INTEGERS, *FLOATS) if floats else INTEGERS
        if found.shape or found.dtype not in kinds or found.value is None:
            raise self.refuse(name, f"should be a number of {', '.join(kinds)}, and is {self.described(found)}")
        if not low <= found.value <= high:  # NaN fails both
            raise self.refuse(name, f"is {found.value:g}, which is not from {low:g} to {high:g}")
        return found.value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number; see `scalar`."""
        return int(self.scalar(name, low, high, default))

    def array(self, name: str, shape: tuple[int, ...], kinds: tuple[str, ...] = FLOATS, needed: bool = True) -> bool:
        """Return whether an array exists. Raises `UserError` for another shape or dtype."""
        found = self.left.pop(f"decoder/{name}", None)
        if found is None and needed:
            raise self.refuse(name, "is missing")
        if found is not None and (found.shape != shape or found.dtype not in kinds):
            raise self.refuse(name, f"should be {list(shape)} of {' or '.join(kinds)}, and is {self.described(found)}")
        return found is not None

    @staticmethod
    def described(variable: Variable) -> str:
        return f"{list(variable.shape)} of {variable.dtype}"

    def rows(self, name: str) -> int:
        """Return the rows of a matrix that no other variable gives."""
        found = self.left.get(f"decoder/{name}")
        if found is None:
            raise self.refuse(name, "is missing")
        if len(found.shape) != 2:
            raise self.refuse(name, f"should be a matrix, and is {self.described(found)}")
        return found.shape[0]

    def matrix(self, scope: str, rows: int, columns: int) -> None:
        """Check a matrix: with scales if it is quantized, and without if not. The engine would mistake other scales for
        those of its own quantization."""
        found = self.left.get(f"decoder/{scope}/weight")
        self.array(f"{scope}/weight", (rows, columns), ("int8", "int16", *FLOATS))
        if found is not None and found.dtype in ("int8", "int16"):
            self.array(f"{scope}/weight_scale", (rows,) if found.dtype == "int8" else (), ("float32",))

    def linear(self, scope: str, rows: int, columns: int) -> bool:
        """Check a matrix and an optional bias. Return whether it has one."""
        self.matrix(scope, rows, columns)
        return self.array(f"{scope}/bias", (rows,), needed=False)

    def norm(self, scope: str, width: int) -> bool:
        """Check a norm. Return whether it has a beta, without which the engine computes another kind of norm."""
        self.array(f"{scope}/gamma", (width,))
        self.flag(f"{scope}/layer_norm_use_residual")
        return self.array(f"{scope}/beta", (width,), needed=False)

    def flag(self, name: str, default: int = 0) -> int:
        return self.integer(name, 0, 1, default)

    def check(self) -> None:
        """Raise `UserError` that names the first wrong variable."""
        heads = self.told("heads", self.integer("num_heads", 1, LARGEST), "num_heads")
        pre_norm = self.integer("pre_norm", 0, 1)
        self.integer("activation", ACTIVATIONS[0], ACTIVATIONS[-1])
        self.vocabulary = self.told("vocabulary", self.rows("embeddings/weight"), "embeddings/weight")
        embedded = self.left["decoder/embeddings/weight"].shape[1]
        output = "layer_0/self_attention/linear_1/weight"
        width = self.told("width", self.rows(output), output)
        self.matrix("embeddings", self.vocabulary, embedded)
        for name in ("scale_embeddings", "embeddings/multiply_by_sqrt_depth", "scale_outputs"):
            self.scalar(name, -LARGEST, LARGEST, 1, floats=True)
        for name in ("alibi_use_positive_positions", "scale_alibi", "start_from_zero_embedding"):
            self.flag(name)
        self.scalar("final_logit_softcapping", 0, LARGEST, 0, floats=True)
        window, alibi = self.integer("sliding_window", 0, LARGEST, 0), self.flag("alibi")
        if embedded != width:
            self.linear("project_in", width, embedded)
            self.linear("project_out", embedded, width)
        self.linear("projection", self.vocabulary, embedded)
        betas = {scope: self.norm(scope, width) for scope in self.outer_norms(pre_norm)}
        layers = self.layers()
        self.integer("alignment_layer", -layers, layers - 1, -1)
        self.integer("alignment_heads", 0, heads, 1)
        found = [_Layer(self, f"layer_{number}", width, heads, window) for number in range(layers)]
        for number, layer in enumerate(found):
            if layer.extras != found[0].extras:
                (name, *_) = sorted(layer.extras ^ found[0].extras)
                raise self.refuse(f"layer_{number}", f"differs from layer_0: only one of the two has {name}")
        betas |= {f"layer_0/{name}": f"{name}/beta" in found[0].extras for name in found[0].norms}
        if len(set(betas.values())) > 1:
            (name, *_) = sorted(name for name, has in betas.items() if not has)
            raise self.refuse(f"{name}/beta", "is missing, and other norms have theirs")
        if not found[0].rotary and not alibi:
            places = self.rows("position_encodings/encodings")
            self.told("positions", places, "position_encodings/encodings")
            self.array("position_encodings/encodings", (places, width))
        if self.left:
            name = min(self.left).removeprefix("decoder/")
            raise self.refuse(name, "is unknown to CTranslate2's decoder")

    def outer_norms(self, pre_norm: int) -> list[str]:
        """Return the norms outside of layers: that of the embeddings if it exists, and the last one. Only models whose
        layers end with a norm, or whose config says so, lack the last."""
        needed = pre_norm and not self.config.get("_remove_final_layer_norm")
        last = ["layer_norm"] if needed or self.has("layer_norm") else []
        return last + (["layernorm_embedding"] if self.has("layernorm_embedding") else [])

    def layers(self) -> int:
        """Return the number of layers, which are numbered from 0 without gaps."""
        places = {name.split("/")[1] for name in self.left if name.startswith("decoder/layer_")}
        count = next(number for number in range(len(places) + 1) if f"layer_{number}" not in places)
        if not count:
            raise self.refuse("layer_0", "is missing")
        return self.told("layers", count, f"layer_{count - 1}")


class _Layer:
    """A layer, whose variables are taken from its decoder's. `extras`: names of optional parts, which all layers must
    share. `norms`: the scopes of its norms."""

    def __init__(self, decoder: _Decoder, scope: str, width: int, heads: int, window: int) -> None:
        self.decoder, self.scope = decoder, scope
        self.extras: set[str] = set()
        there = (each for each in reversed(NORMS) if all(decoder.has(f"{scope}/{name}") for name in each))
        self.norms = next(there, set())
        if not self.norms:
            raise decoder.refuse(f"{scope}/input_layer_norm", "is missing, or another norm of this layer")
        for name in sorted(self.norms):
            self.norm(name, width)
        self.rotary = self.attention(width, heads, window)
        self.feed_forward(width)
        decoder.scalar(f"{scope}/layer_scalar", -LARGEST, LARGEST, 1, floats=True)

    def norm(self, name: str, width: int) -> None:
        if self.decoder.norm(f"{self.scope}/{name}", width):
            self.extras.add(f"{name}/beta")

    def linear(self, name: str, rows: int, columns: int) -> None:
        if self.decoder.linear(f"{self.scope}/{name}", rows, columns):
            self.extras.add(f"{name}/bias")

    def feed_forward(self, width: int) -> None:
        name = f"{self.scope}/ffn/linear_0/weight"
        inner = self.decoder.told("inner width", self.decoder.rows(name), name)
        self.linear("ffn/linear_0", inner, width)
        self.linear("ffn/linear_1", width, inner)
        if self.decoder.has(f"{self.scope}/ffn/linear_0_noact"):
            self.linear("ffn/linear_0_noact", inner, width)
            self.extras.add("ffn/linear_0_noact")

    def attention(self, width: int, heads: int, window: int) -> bool:
        """Check the attention. Return whether it uses rotary embeddings."""
        decoder, scope = self.decoder, f"{self.scope}/self_attention"
        of_keys = decoder.integer(f"{scope}/num_heads_kv", 1, heads, heads)
        decoder.told("heads of keys", of_keys, f"{scope}/num_heads_kv")
        if heads % of_keys:
            raise decoder.refuse(f"{scope}/num_heads_kv", f"is {of_keys}, which does not divide {heads} heads")
        if f"decoder/{scope}/head_dim" not in decoder.left and width % heads:
            raise decoder.refuse("num_heads", f"is {heads}, which does not divide a width of {width}")
        size = decoder.integer(f"{scope}/head_dim", 1, LARGEST, width // heads)
        decoder.told("head_dim", size, f"{scope}/head_dim")
        self.linear("self_attention/linear_0", (heads + 2 * of_keys) * size, width)
        self.linear("self_attention/linear_1", width, heads * size)
        for name in ("q_norm", "k_norm", "v_norm"):
            if decoder.has(f"{scope}/{name}"):
                self.norm(f"self_attention/{name}", size)
                self.extras.add(f"self_attention/{name}")
        decoder.scalar(f"{scope}/queries_scale", -LARGEST, LARGEST, 1, floats=True)
        own = decoder.integer(f"{scope}/sliding_window", 0, LARGEST, 0)
        if 0 < own < window:  # masks are as long as the decoder's window
            raise decoder.refuse(f"{scope}/sliding_window", f"is {own}, less than the decoder's {window}")
        return self.positions(scope, size)

    def positions(self, scope: str, size: int) -> bool:
        """Check the rotary embeddings of heads of this size. Return whether there are any."""
        decoder = self.decoder
        rotates = f"decoder/{scope}/rotary_dim" in decoder.left
        rotated = decoder.integer(f"{scope}/rotary_dim", 0, size, 0) or size
        kind = decoder.integer(f"{scope}/rotary_scaling_type", SCALING_TYPES[0], SCALING_TYPES[-1], -1)
        if rotates and rotated % 2:
            raise decoder.refuse(f"{scope}/rotary_dim", f"is {rotated}, and positions are rotated in pairs")
        decoder.flag(f"{scope}/rotary_interleave", 1)
        for name in ("base", "scaling_factor", "low_freq_factor", "high_freq_factor"):
            decoder.scalar(f"{scope}/rotary_{name}", math.ulp(0), 1e30, 1, floats=True)
        for name in ("original_max_position_embeddings", "max_position_embeddings"):
            decoder.integer(f"{scope}/{name}", 0, LARGEST, 0)
        for name in ("long", "short") if kind == SU else ():
            decoder.array(f"{scope}/rotary_scaling_{name}_factor", (rotated // 2,))
        if rotates:
            self.extras.add("self_attention/rotary_dim")
        return rotates
