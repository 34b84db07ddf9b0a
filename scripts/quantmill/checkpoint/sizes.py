"""Check the sizes in a config.json against the weights' headers before any library builds a model of them.

Libraries allocate by config.json: a list of layers, a name for each label. Three rules bound that. Sizes that every
decoder has are whole numbers. A key whose name says that it is a size is at most the largest dimension or count in the
headers, with an allowance for parts that are described but absent. The number of layers, of experts, and the rows of
tables are those of the headers. Other keys are not checked.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quantmill.checkpoint import EXPERTS, EXPERTS_USED, TABLES, reads_more_than_text
from quantmill.checkpoint.tensor import Tensor
from quantmill.common.program import UserError

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MORE_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # of multi-token prediction
ALONE = (*LAYERS, "vocab_size", "hidden_size", "n_embd", "d_model")  # one number, whatever the architecture
POSITIVE = (*ALONE, "num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim")
WHOLE = frozenset(
    (
        *(*POSITIVE, *EXPERTS, *EXPERTS_USED, "num_heads", "type_vocab_size"),
        *("intermediate_size", "moe_intermediate_size", "n_inner", "d_ff", "ffn_dim", "num_labels"),
        *("max_position_embeddings", "n_positions"),
    )
)
# ends of keys of sizes; the least bounds allow the defaults of parts that a config describes and the files lack
MANY_LAYERS = re.compile(r"(^|_)(layers?|blocks?|depths?)$")
MANY_EXPERTS = re.compile(r"(^|_)experts?$")
POSITIONS = re.compile(
    r"(^|_)(position_embeddings|positions|ctx|seq_len|seq_length|sequence_length|context_length"
    r"|(window|chunk|block|batch)_sizes?)$"
)
SIZES = re.compile(
    r"(^|_)(sizes?|dims?|heads?|labels|classes|groups?|rank|embd|inner|channels|width|kernel|state|hidden|features"
    r"|codebooks|units|model|ff|kv|conv)$"
)
LEAST_LAYERS, LEAST_EXPERTS, LEAST_SIZE, MOST_POSITIONS = 2**10, 2**16, 2**16, 2**24
UNKNOWN_SIZE = 2**20  # the most without weights; the largest vocabulary has 262,144 tokens
# tables of positions, which may have some rows more than the config says
POSITION_TABLES = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight", "position_embedding.weight")
MORE_POSITIONS = 8
# types whose embeddings have rows beyond the vocabulary
MORE_ROWS = ("mllama", "mllama_text_model", "moshi")
IMAGES = re.compile(r"image|img")
LOOPS = re.compile(r"(^|_)(cycles|loops)$")  # keys of models that run their layers several times
NUMBERED = re.compile(r"^(?:(.*?)\.)?(\d{1,9})\.")  # up to the first number of a tensor's name
EXPERT = re.compile(r"^(.*\bexperts)\.(\d{1,9})\.")
WRONG = "correct config.json, or download the model again"


def text_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that transformers builds the language model from: those of `text_config` first."""
    inner = config.get("text_config")
    return {**config, **(inner if isinstance(inner, dict) else {})}


def check(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
    """Raise `UserError` for the first size in a config.json that its weights do not have.

    Args:
        path: of the config.json. tensors: of the model; None if it has none yet, as one of random weights.
    """
    counts = {part: len(numbers) for part, numbers in _numbers_of(NUMBERED, tensors or {}).items()}
    dims = max((size for tensor in (tensors or {}).values() for size in tensor.shape), default=0)
    limits = (
        (MANY_LAYERS, max(LEAST_LAYERS, *counts.values(), 0)),
        (MANY_EXPERTS, max(LEAST_EXPERTS, dims)),
        (POSITIONS, MOST_POSITIONS),
        (SIZES, UNKNOWN_SIZE if tensors is None else max(LEAST_SIZE, dims)),
    )
    for where, key, value in _entries(config):
        if key in WHOLE:
            _check_whole(path, where, key, value)
        limit = next((limit for names, limit in limits if names.search(key)), None)
        if limit is None:
            continue
        for number in _numbers(value):
            if not -limit <= number <= limit:
                what = "is more than its weights can have" if tensors else "is more than any model has"
                raise UserError(f"{path}: {where} is {number!r:.60}, which {what} ({limit}); {WRONG}")
    if tensors:
        words = text_words(config)
        for level in (words, config):  # some classes read one, some the other
            _check_layers(path, level, counts)
        _check_experts(path, words, tensors)
        _check_tables(path, words, tensors)


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield every key of a config and of its parts, with its place, its name and its value. A quantization_config is
    left to the reader of its layout."""
    waiting: list[tuple[str, Any]] = [("", {key: config[key] for key in config if key != "quantization_config"})]
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, dict):
            for key, each in value.items():
                yield f"{where}{key:.60}", key, each
                waiting.append((f"{where}{key:.60}.", each))
        elif isinstance(value, list):
            waiting += [(where, each) for each in value if isinstance(each, dict | list)]


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers of a value, or of nested lists."""
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _check_whole(path: Path, where: str, key: str, value: Any) -> None:
    """Check that a size is a whole number, or a list with one for each layer; null is the class's default."""
    least = 1 if key in POSITIVE else 0
    each_layer = isinstance(value, list) and key not in ALONE
    given = [each for each in (value if each_layer else [value]) if each is not None]
    if wrong := [each for each in given if type(each) is not int or each < least]:
        what = f"{where} is {wrong[0]!r:.60}, where a whole number from {least} on is expected"
        raise UserError(f"{path}: {what}; {WRONG}")


def _numbers_of(pattern: re.Pattern[str], names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers that follow each part of a model in its tensors' names: `model.layers` -> {0, 1, 2}."""
    found: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if match := pattern.match(name):
            found[match[1] or ""].add(int(match[2]))
    return found


def _check_layers(path: Path, words: Mapping[str, Any], counts: Mapping[str, int]) -> None:
    """Check that the number of layers is that of the weights: of one part of the language model, or of several
    together."""
    parts = {part: count for part, count in counts.items() if not reads_more_than_text(part)}
    more = sum(each for key in MORE_LAYERS for each in _numbers(words.get(key)) if type(each) is int)
    said = {key: words[key] for key in LAYERS if type(words.get(key)) is int}
    possible = {count - each for count in (*parts.values(), sum(parts.values())) for each in (0, more)}
    if said and not possible & {*said.values()} and not any(map(LOOPS.search, words)):
        key = next(iter(said))
        part, count = max(parts.items(), key=lambda item: item[1], default=("layers", 0))
        raise UserError(f"{path}: {key} is {said[key]}, and its weights have {count} ({part}.*); {WRONG}")


def _check_experts(path: Path, words: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Check that the number of experts is that of the tensors' names or of stacked tensors, and that no token is routed
    to more."""
    counts = {len(numbers) for numbers in _numbers_of(EXPERT, tensors).values()}
    stacked = {size for name, each in tensors.items() if ".experts." in name for size in each.shape[:1]}
    possible = counts or stacked
    empty = words.get("zero_expert_num")  # LongCat's router also chooses experts that do nothing
    possible |= {count - empty for count in possible if type(empty) is int}
    for key in EXPERTS:
        said = list(_numbers(words.get(key)))
        wrong = [each for each in said if each > 1 and each not in possible]
        if possible and wrong and sum(said) not in possible:
            raise UserError(f"{path}: {key} is {wrong[0]}, and its weights have {max(possible)}; {WRONG}")
    most = max((each for key in EXPERTS for each in _numbers(words.get(key))), default=None)
    for key in EXPERTS_USED:
        if most and (more := [each for each in _numbers(words.get(key)) if each > most]):
            raise UserError(f"{path}: {key} is {more[0]}, of {most} experts; {WRONG}")


def _check_tables(path: Path, words: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Check that the embeddings have a row for each token of the vocabulary, and tables of positions one for each
    position."""
    tables = {
        tensor.shape[0]: tensor.name
        for tensor in tensors.values()
        if tensor.name.endswith(TABLES) and len(tensor.shape) == 2 and not reads_more_than_text(tensor.name)
    }
    said, exact = words.get("vocab_size"), len(tables) == 1 and words.get("model_type") not in MORE_ROWS
    if type(said) is int and exact and said not in tables:
        ((rows, name),) = tables.items()
        relation = "below" if said < rows else "above"
        raise UserError(
            f"{path}: vocab_size is {said}, {relation} the {rows} rows of {name}; resize the embeddings, or correct "
            "config.json"
        )
    for tensor in tensors.values():
        key = next((key for key in ("n_positions", "max_position_embeddings") if type(words.get(key)) is int), None)
        if (
            key
            and tensor.name.endswith(POSITION_TABLES)
            and len(tensor.shape) == 2
            and not (reads_more_than_text(tensor.name) or IMAGES.search(tensor.name))
            and not 0 <= tensor.shape[0] - words[key] <= MORE_POSITIONS
        ):
            raise UserError(f"{path}: {key} is {words[key]}, and {tensor.name} has {tensor.shape[0]} rows; {WRONG}")
