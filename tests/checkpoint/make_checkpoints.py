"""Run in envs/torch: write .bin files with torch, and next to each what the official safetensors writer makes of it."""

import json
import sys
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import save_file

out = Path(sys.argv[1])
torch.manual_seed(0)
base = torch.randn(6, 10)
samples = {
    "dtypes": {
        "half": torch.randn(3, 5).half(),
        "bfloat": torch.randn(4).bfloat16(),
        "float": torch.randn(2, 2, 2),
        "double": torch.randn(3).double(),
        "long": torch.arange(7),
        "int": torch.arange(5, dtype=torch.int32),
        "short": torch.arange(4, dtype=torch.int16),
        "char": torch.arange(-3, 3, dtype=torch.int8),
        "byte": torch.arange(9, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "float8": torch.randn(6).to(torch.float8_e4m3fn),
        "float8_e5m2": torch.randn(3, 2).to(torch.float8_e5m2),
        "wide": torch.tensor([1, 65535], dtype=torch.uint16),
        "complex": torch.tensor([1 + 2j, -3j]),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "naïve name": torch.ones(1),
    },
    "views": {
        "transposed": base.t(),
        "columns": base[:, 2:5],
        "steps": base[::2, ::3],
        "row": base[4],
        "expanded": torch.arange(3.0).expand(4, 3),
    },
    "parameters": OrderedDict(weight=torch.nn.Parameter(torch.randn(300_001)), bias=torch.nn.Parameter(torch.zeros(2))),
}
for name, tensors in samples.items():
    torch.save(tensors, out / f"{name}.bin")
    plain = {key: value.detach().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    save_file(plain, out / f"{name}.safetensors", metadata={"format": "pt"})
# a model in two .bin shards whose head is tied, and stored with the embeddings in one storage or in the other shard
embeddings, other = torch.randn(8, 4), torch.randn(4, 4)
for name, first, second in (
    ("tied", {"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings}, {"model.norm.weight": other}),
    (
        "copied",
        {"model.embed_tokens.weight": embeddings},
        {"lm_head.weight": embeddings.clone(), "x": other, "y": other},
    ),
):
    (out / name).mkdir()
    files = {"pytorch_model-00001-of-00002.bin": first, "pytorch_model-00002-of-00002.bin": second}
    for file, tensors in files.items():
        torch.save(tensors, out / name / file)
    weight_map = {key: file for file, tensors in files.items() for key in tensors}
    (out / name / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (out / name / "config.json").write_text(json.dumps(config))
torch.save({"weight": torch.ones(2)}, out / "legacy.bin", _use_new_zipfile_serialization=False)
torch.save({"weight": torch.ones(2), "optimizer": {"lr": 0.1}}, out / "training.bin")
torch.save(torch.nn.Linear(2, 2), out / "module.bin")
complex_numbers = torch.randn(4, dtype=torch.complex64)
torch.save({"w": complex_numbers.conj()}, out / "conjugated.bin")
torch.save({"w": complex_numbers.conj().imag}, out / "negated.bin")
