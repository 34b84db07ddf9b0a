"""Build a GGUF file with llama.cpp's programs.

    python scripts/quantmill build.gguf SRC DST --parameters '{"type": "f16"}' --name my-model
        --evaluation evaluation.json --text evaluation.txt
    python scripts/quantmill build.gguf SRC DST --parameters '{"type": "q4_k_m"}' --base GGUF-F16 --imatrix IMATRIX
    python scripts/quantmill build.gguf SRC DST --parameters '{"size": 4.5}' --base GGUF-F16 --imatrix IMATRIX
        --sensitivity FILE

Without --base, convert_hf_to_gguf.py converts the checkpoint SRC to one of its types, and the tokenizer in the file is
proved: it must turn --text into the ids of --evaluation. Random weights get a file without a tokenizer. With --base,
llama-quantize quantizes that file to any of its types. Each tensor's type is read back from the file, because
llama-quantize takes another type where a row does not fit. With --sensitivity (build.gguf_sensitivity) each tensor's
type is chosen by its cost, and the file is at most as large as that of the type `size`, or of `size` bits a weight.
QUANTMILL_LLAMA_CPP names a folder of llamacpp.compile.
"""

import hashlib
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from quantmill import llamacpp
from quantmill.build import check_parameters, finish, parser
from quantmill.checkpoint import gguf_file, shards
from quantmill.common import manifest, program
from quantmill.common.atomic import write_atomically
from quantmill.common.program import UserError, run_child
from quantmill.llamacpp import files, quantizer, vocabulary
from quantmill.tokens import plain_text
from quantmill.tokens.files import Tokens

CONVERTED = ("f32", "f16", "bf16")


def convert(source: Path, out: Path, type_: str, name: str, pre: str = "", *more: str) -> None:
    """Run llama.cpp's converter. Raises `UserError` with its reason where it refuses."""
    command = [*program.command("llamacpp.convert"), pre, source, "--outfile", out]
    result = run_child([*command, "--outtype", type_, "--model-name", name, *more])
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        raise UserError(f"{source}: llama.cpp cannot convert it ({(lines or ['no message'])[-1][:300]})")


def pre_tokenizer(folder: Path, origin: dict[str, Any], options: Namespace) -> str:
    """Return the pre-tokenizer for `convert`; `none` for random weights. Raises `UserError` if none is proved."""
    if origin["source"].get("tokenizer") is False:
        return vocabulary.NONE
    text = plain_text.read(options.text / "text.txt" if options.text.is_dir() else options.text)
    tokens = Tokens.read(options.evaluation)
    if tokens.text_sha256 != hashlib.sha256(text.encode()).hexdigest():
        raise UserError(f"{options.text}: is not the text of {options.evaluation}")
    names = vocabulary.candidates(options.src / "tokenizer.json")
    file = folder / "vocabulary.gguf"
    convert(options.src, file, "f16", options.name, names[0], "--vocab-only")
    try:
        return vocabulary.prove(file, text, tokens.ids, names) or names[0]
    finally:
        file.unlink()


def quantize(out: Path, options: Namespace) -> dict[str, Any]:
    """Run llama-quantize on --base. Return its parameters, for the manifest."""
    parameters: dict[str, Any] = {"type": options.type}
    command: list[object] = []
    if options.imatrix:
        parameters["imatrix"] = manifest.read(options.imatrix)["files"][quantizer.IMATRIX]["sha256"]
        command = ["--imatrix", f"{options.imatrix.name}/{quantizer.IMATRIX}"]  # the file records this path
    if options.sensitivity:
        nbytes = int(options.bits * shards.text_parameters(options.src) / 8) if options.bits else None
        chosen = quantizer.mix(options.base, options.imatrix, options.sensitivity, options.type, nbytes)
        lines = out.with_name("tensor-types.txt")
        lines.write_text(quantizer.type_lines(chosen), encoding="utf-8")
        command += ["--tensor-type-file", lines]
        size = {"bits": options.bits} if options.bits else {"as_large_as": options.type}
        parameters |= {"type": "mixed", **size, "estimated_kld": sum(choice.kld for choice in chosen.values())}
    base = files.first(options.base).absolute()
    place = options.imatrix.parent if options.imatrix else None
    llamacpp.call("llama-quantize", *command, base, out, options.type, options.threads, cwd=place)
    return parameters


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--name", default="model", help="of the model, for the file's metadata")
    arguments.add_argument("--evaluation", type=Path, help="what tokens.tokenize_texts wrote")
    arguments.add_argument("--text", type=Path, help="the text of --evaluation")
    arguments.add_argument("--base", type=Path, help="an artifact of this program's, to quantize")
    arguments.add_argument("--imatrix", type=Path, help="what build.imatrix wrote")
    arguments.add_argument("--sensitivity", type=Path, help="what build.gguf_sensitivity wrote, to choose types by")
    options = arguments.parse_args()
    given = check_parameters(options.parameters, (), ("type", "imatrix", "size"))
    size = given.get("size")  # of a mixture: a type, or bits a weight
    options.bits = None if isinstance(size, str) else size
    options.type = given.get("type") or (size if isinstance(size, str) else "q4_k_m")
    if not options.base and options.type not in CONVERTED:
        raise UserError(f"type {options.type}: llama.cpp's converter writes {', '.join(CONVERTED)}; name a --base")
    if options.sensitivity and not (options.base and options.imatrix):
        raise UserError("--sensitivity needs the --base and the --imatrix that it was measured with; name them too")

    origin = manifest.read_checked(options.src)
    if options.base:
        manifest.read_checked(options.base)
    parameters = {"type": options.type}
    matrix = manifest.read(options.imatrix) if options.imatrix else {}
    with write_atomically(options.dst) as folder:
        folder.mkdir()
        out = (folder / files.MODEL).absolute()
        if options.base:
            parameters = quantize(out, options)
        else:
            parameters["pre_tokenizer"] = pre_tokenizer(folder, origin, options)
            convert(options.src, out, options.type, options.name, parameters["pre_tokenizer"])
        peak = manifest.peak_rss_bytes(children=True)  # of llama.cpp's programs, without the gate
        for path in files.beside(options.src):
            shutil.copy(path, folder / path.name)
        layout = "source" if options.type in CONVERTED else options.layout
        content = gguf_file.read_all(out)
        finish(
            folder,
            options,
            layout,
            tool="llama.cpp",
            tool_version=llamacpp.build()["sources"],
            parameters=parameters | {"tensors": files.types(content)},
            weight_files=[files.MODEL],
            weight_bytes_per_token=files.bytes_per_token(content),
            calibration_sha256=matrix.get("calibration_sha256"),
            experts=matrix.get("experts"),
            peak_memory_bytes=peak,
        )
