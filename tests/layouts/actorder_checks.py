"""Run with compressed-tensors 0.17: write a layer in int4 whose groups are not in order to FOLDER, and print what the
library decompresses it to, as JSON.

    python tests/layouts/actorder_checks.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

OUTPUTS, INPUTS, SIZE = 24, 64, 16
folder, name = Path(sys.argv[1]), "model.layers.0.mlp.up_proj"
made = torch.Generator().manual_seed(2)
weights = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=SIZE, actorder="group")
scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
numbers = torch.randint(-8, 8, (OUTPUTS, INPUTS), generator=made, dtype=torch.int8)
zeros = torch.randint(-8, 8, (OUTPUTS, INPUTS // SIZE), generator=made, dtype=torch.int8)
parts = {
    "weight_packed": pack_to_int32(numbers, 4),
    "weight_scale": torch.rand((OUTPUTS, INPUTS // SIZE), generator=made),
    "weight_zero_point": pack_to_int32(zeros, 4, packed_dim=0).contiguous(),
    "weight_shape": torch.tensor([OUTPUTS, INPUTS]),
    "weight_g_idx": (torch.randperm(INPUTS, generator=made) // SIZE).int(),
}
folder.mkdir()
save_file({f"{name}.{part}": tensor for part, tensor in parts.items()}, folder / "model.safetensors")
group = {"format": "pack-quantized", "weights": weights.model_dump(mode="json")}
words = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
(folder / "config.json").write_text(json.dumps({"quantization_config": words}))
print(json.dumps(PackedQuantizationCompressor.decompress(parts, scheme)["weight"].tolist()))
