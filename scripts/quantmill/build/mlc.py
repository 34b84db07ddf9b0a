"""Write a model's weights in MLC-LLM's format, with the bytes that its convert_weight writes on a CPU.

    python scripts/quantmill build.mlc SRC DST --library LIB --parameters '{"quantization": "q4f16_1", "tool": "auto"}'
    python scripts/quantmill build.mlc SRC DST --weights-only --parameters '{"quantization": "q4f16_1"}'

Neither MLC-LLM nor TVM is needed. Weights alone serve any runtime that reads the format. With a model library, which
mlc.compile writes, the artifact also runs here and passes the quality gate.

With --mlc-llm-python, an interpreter that has a working MLC-LLM, MLC-LLM's convert_weight and gen_config run instead.
With a library MLC-LLM also compiles one for its own engine (mlc_llm.so).
"""

import tomllib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from quantmill import devices
from quantmill.build import check_parameters, finish, parser
from quantmill.checkpoint import shards
from quantmill.common import manifest
from quantmill.common.atomic import clone_or_copy, write_atomically
from quantmill.common.program import PACKAGE, UserError
from quantmill.mlc import chat_config, mlc_llm_tool, parameters, source_config
from quantmill.mlc import shards as mlc_shards
from quantmill.mlc.source_config import SourceConfig

LIBRARY = "model_lib.so"
PROJECT = PACKAGE.parents[1] / "pyproject.toml"


def choose_tool(tool: str, python: Path | None) -> str:
    """Return `mlc_llm` or `builtin`. Raises `UserError` if mlc_llm is asked for and does not work."""
    if tool == "builtin" or (tool == "auto" and python is None):
        return "builtin"
    reason = mlc_llm_tool.why_not(python) if python else "--mlc-llm-python names no interpreter"
    if reason and tool == "mlc_llm":
        raise UserError(f"{python or 'mlc_llm'}: no working mlc_llm: {reason}; the tool builtin writes the same bytes")
    return "builtin" if reason else "mlc_llm"


def build(folder: Path, source: shards.Checkpoint, config: SourceConfig, quantization: str) -> None:
    """Write the weights, their index, mlc-chat-config.json and the tokenizer's files, without MLC-LLM."""
    found = parameters.find(source, config, parameters.LAYOUTS[quantization])
    total = sum(part.numel for parameter in found for part in parameter.parts)
    with tqdm(total=total, unit=" weights", unit_scale=True, desc="to MLC", disable=None) as bar:
        mlc_shards.write(folder, found, parameters.count_weights(source, found), bar.update)
    chat_config.write(folder, source.folder, config, quantization)
    for name in chat_config.TOKENIZER_FILES:
        if (source.folder / name).is_file():
            clone_or_copy(source.folder / name, folder / name)


def main() -> None:
    arguments = parser(__doc__)
    kind = arguments.add_mutually_exclusive_group(required=True)
    kind.add_argument("--library", type=Path, help="what mlc.compile wrote for this model")
    kind.add_argument(
        "--weights-only", action="store_true", help="no library, so nothing runs it here: no quality gate"
    )
    arguments.add_argument("--mlc-llm-python", type=Path, help="the interpreter that has mlc_llm")
    options = arguments.parse_args()
    if options.weights_only:  # nothing runs them here
        options.engine = options.gate_reference = None
    given = check_parameters(options.parameters, ("quantization",), ("tool",))
    quantization, tool = given["quantization"], given.get("tool", "auto")
    if quantization not in parameters.LAYOUTS:
        raise UserError(f"--parameters: quantization {quantization!r} is not one of {', '.join(parameters.LAYOUTS)}")

    source = shards.find(options.src)
    if source.form != "safetensors":
        raise UserError(f"{options.src}: holds {source.form} files; convert them with checkpoint.to_safetensors first")
    if options.library and not options.library.is_file():
        raise UserError(f"{options.library}: no such file; mlc.compile writes a model library")
    config = source_config.read(source.config(), options.src / "config.json")
    manifest.read_checked(options.src)
    tool = choose_tool(tool, options.mlc_llm_python)
    with write_atomically(options.dst, source=options.src) as folder:
        folder.mkdir()
        if tool == "mlc_llm":
            device = devices.resolve(options.device, hold=False) if options.library else None
            mlc_llm_tool.convert(options.mlc_llm_python, source, config, folder, quantization, device)
            version = mlc_llm_tool.version(options.mlc_llm_python)
        else:
            build(folder, source, config, quantization)
            own = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["version"]
            version = f"{own}, numpy {np.__version__}"
        if options.library:
            clone_or_copy(options.library, folder / LIBRARY)
        finish(
            folder,
            options,
            options.layout if quantization == "q4f16_1" else None,  # which the layout's module reads
            tool="quantmill" if tool == "builtin" else tool,
            tool_version=version,
            parameters={"quantization": quantization, "weights_only": options.weights_only},
            weight_files=sorted(path.name for path in folder.glob("params_shard_*.bin")),
            weight_bytes_per_token=mlc_shards.bytes_per_token(folder),
        )
