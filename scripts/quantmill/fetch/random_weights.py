"""Make a checkpoint of random weights from a config.json. Speed, which the values do not change, can be measured.

    python scripts/quantmill fetch.random_weights CONFIG DST [--seed 0]

CONFIG is a config.json of a dense causal language model that transformers knows, or a folder that holds one and
optionally a tokenizer. Weights are float16, normal with the config's own deviation. So that a 7B model takes only the
disk's time, they repeat after about 4 million values. That number is prime, so that no two rows of a matrix are equal,
which would tie tokens. Each tensor starts at another value: CTranslate2 stores equal tensors once, and would read a 7B
model's weights from the cache.
"""

import io
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tqdm import tqdm

from quantmill.checkpoint import headers, model_shape, safetensors_file, selection, sharding, shards
from quantmill.checkpoint.copying import write_all
from quantmill.checkpoint.tensor import Tensor, refuse_pointer, row_major
from quantmill.common import manifest, remote_code
from quantmill.common.atomic import clone_or_copy, write_atomically
from quantmill.common.program import UserError, first_line, parser

MARGIN = 8  # times the size of a model of Llama's layers; others share layers, or have fewer experts
SHARD_BYTES = 5 * 10**9  # as transformers shards
PERIOD = 2**22 - 3  # values until the noise repeats; prime
STEP = 1_000_003  # prime, so that thousands of tensors start at different places


def parameter_shapes(config_path: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return names and shapes of the model's parameters, and its vocabulary's size. transformers gives them on the meta
    device, where no weight is allocated. A tied head is listed once, under the embeddings' name. Raises `UserError` if
    transformers has no such causal language model."""
    remote_code.forbid()
    try:
        config = transformers.AutoConfig.from_pretrained(config_path)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # its many config and model classes raise anything
        reason = f"transformers cannot build a language model from it ({first_line(error)})"
        raise UserError(f"{config_path}: {reason}") from None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return shapes, config.get_text_config().vocab_size


def check_room(config_path: Path, nbytes: int, folder: Path) -> None:
    """Raise `UserError` if the disk of a folder has no room for `nbytes` of weights."""
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise UserError(
            f"{config_path}: a model of its sizes has {nbytes / 1e9:,.0f} GB of weights, and {there} has "
            f"{free / 1e9:,.0f} GB free; correct its sizes, or free some space"
        )


def write_placeholder_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer whose tokens are `<unk>`, `<s>`, `</s>`, `<|endoftext|>`, `<4>`, `<5>`, … Converters need one,
    though nothing reads the text. The special tokens have the names that model classes add if they are missing, which
    would make the vocabulary larger than the model's."""
    special = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    names = [*special, *(f"<{number}>" for number in range(len(special), vocab_size))]
    vocabulary = {name: number for number, name in enumerate(names[:vocab_size])}
    Tokenizer(WordLevel(vocabulary, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("config", type=Path, help="config.json, or a folder that holds it")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()

    config_path = options.config / "config.json" if options.config.is_dir() else options.config
    config = shards.read_config(config_path)
    config.pop("quantization_config", None)  # of the original weights
    headers.check(config_path, config)
    expected = model_shape.of(config)
    check_room(config_path, 2 * expected.parameters // MARGIN if expected else 0, options.dst)
    shapes, vocab_size = parameter_shapes(config_path)
    # tensors that are in no file yet
    tensors = [Tensor(name, "F16", shape, row_major(shape), Path(), 0) for name, shape in shapes.items()]
    check_room(config_path, sum(tensor.nbytes for tensor in tensors), options.dst)
    deviation = float(config.get("initializer_range", 0.02))
    noise = np.random.default_rng(options.seed).normal(0, deviation, PERIOD).astype(np.float16)

    starts = {tensor.name: number * STEP % PERIOD for number, tensor in enumerate(tensors)}

    def write_values(tensor: Tensor, target: io.FileIO) -> None:
        # norm weights are one, so that activations neither vanish nor overflow
        is_norm = len(tensor.shape) == 1 and "norm" in tensor.name
        block = np.ones(PERIOD, np.float16) if is_norm else np.roll(noise, -starts[tensor.name])
        for left in range(tensor.numel, 0, -PERIOD):
            write_all(target, block[: min(left, PERIOD)].view(np.uint8).data)

    lying = selection.carried(options.config) if options.config.is_dir() else []
    given = [path for path in lying if selection.is_tokenizer(path.name)]
    for path in given:
        refuse_pointer(path)
    with write_atomically(options.dst) as folder:
        folder.mkdir()
        total = sum(tensor.nbytes for tensor in tensors)
        with tqdm(total=total, unit="B", unit_scale=True, desc="random weights", disable=None) as bar:
            write_file = partial(safetensors_file.write, copy=write_values, progress=bar.update)
            names = list(sharding.write(folder, "safetensors", sharding.split(tensors, SHARD_BYTES), write_file))
        dtypes = {"torch_dtype": "float16", "dtype": "float16"}
        (folder / "config.json").write_text(json.dumps(config | dtypes, indent=2) + "\n", encoding="utf-8")
        for path in given:
            clone_or_copy(path, folder / path.name)
        if not given:
            write_placeholder_tokenizer(folder, vocab_size)
        manifest.write(
            folder,
            format="source",
            tool="random_weights",
            tool_version=f"transformers {transformers.__version__}",
            parameters={"seed": options.seed, "period": PERIOD, "deviation": deviation},
            source={"kind": "random", "path": str(options.config), "commit": None, "tokenizer": bool(given)},
            weight_files=names,
        )
