#!/usr/bin/env python3
"""A stand-in for a Python interpreter that has MLC-LLM: no MLC-LLM, and no interpreter.

It checks the arguments that Quantmill passes and the folder that they name, and writes files that say so. STAND_IN
makes it something else: `placeholder` a package that can be imported and does nothing, `missing` an interpreter without
one, `failing` one whose convert_weight fails.
"""

import json
import os
import sys
from pathlib import Path

kind, arguments = os.environ.get("STAND_IN", ""), sys.argv[1:]
if kind == "missing":
    sys.exit(f"{sys.argv[0]}: No module named mlc_llm")
if kind == "placeholder":
    sys.exit()
assert arguments.pop(0) == "-P"
if arguments[0] == "-c":
    assert "mlc_llm.__version__" in arguments[1]
    print("0.0.stand-in")
    sys.exit()
assert arguments[:2] == ["-m", "mlc_llm"], arguments
program, *rest = arguments[2:]
if rest == ["--help"]:
    print("usage: mlc_llm convert_weight --quantization QUANTIZATION --output OUTPUT config")
    sys.exit()
if kind == "failing":
    sys.exit("Traceback:\nRuntimeError: no room\n")
source, options = Path(rest[0]), dict(zip(rest[1::2], rest[2::2], strict=True))
output = Path(options.pop("--output"))
assert options.pop("--quantization") == "q4f16_1"
if program == "convert_weight":
    assert options == {"--device": "cpu"}, options
    config = json.loads((source / "config.json").read_text())
    assert "rope_parameters" not in config
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] is None
    assert (source / "tokenizer.json").is_file()
    index = source / "model.safetensors.index.json"
    assert not index.exists()
    index.write_text("{}")  # as MLC-LLM does
    (output / "params_shard_0.bin").write_bytes((source / "model.safetensors").read_bytes()[:100])
    record = {"name": "model.norm.weight", "nbytes": 100}
    (output / "tensor-cache.json").write_text(json.dumps({"records": [{"records": [record]}]}))
elif program == "gen_config":
    assert options == {"--conv-template": "LM"}, options
    (output / "mlc-chat-config.json").write_text('{"model_type": "llama"}')
else:
    assert program == "compile", program
    assert options == {"--device": "cpu"}, options
    assert (source / "mlc-chat-config.json").is_file()
    output.write_text("compiled")
