"""Write llama.cpp's importance matrix of a model, from the study's calibration text.

    python scripts/quantmill build.imatrix GGUF-F16 DST --text calibration.txt --calibration calibration.json
        --evaluation evaluation.json --samples 16 --sequence-length 512

llama-imatrix reads text, not ids, so its tokenizer's ids are first compared with those of --calibration. It reads the
first --samples pieces of --sequence-length tokens, or of the model's context if that is shorter. A text that shares a
passage with the evaluation text is refused. It runs on a GPU if llama.cpp was compiled for one.
"""

import shutil
from pathlib import Path

from quantmill import devices, llamacpp
from quantmill.build.quantizer import calibration, experts
from quantmill.common import manifest
from quantmill.common.atomic import write_atomically
from quantmill.common.program import UserError, parser
from quantmill.llamacpp import files, quantizer, vocabulary
from quantmill.tokens import plain_text
from quantmill.tokens.files import Tokens

TEXT = "calibration.txt"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("base", type=Path, help="artifact of build.gguf, not quantized")
    arguments.add_argument("dst", type=Path, help="folder to write")
    arguments.add_argument("--text", type=Path, required=True, help="the calibration text")
    calibration.add_arguments(arguments)
    devices.add_arguments(arguments)
    options = arguments.parse_args()

    device = devices.resolve(options.device)
    origin = manifest.read_checked(options.base)
    file = files.first(options.base).absolute()
    tokens = Tokens.read(options.calibration)
    ids = tokens.ids
    text = plain_text.read(options.text / "text.txt" if options.text.is_dir() else options.text)
    vocabulary.prove(file, text, ids, [])
    calibration.check_apart(options.calibration, ids, Tokens.read(options.evaluation).ids)
    length = min(options.sequence_length, tokens.context or options.sequence_length)
    chunks = min(options.samples, len(ids) // length)
    if chunks == 0:
        raise UserError(
            f"{options.text}: has {len(ids)} tokens, fewer than one sample of {length}; lower "
            "calibration.sequence_length"
        )
    with write_atomically(options.dst) as folder:
        folder.mkdir()
        (folder / TEXT).write_text(text, encoding="utf-8")
        command = ["-m", file, "-f", TEXT, "-o", quantizer.IMATRIX, "-c", length, "--chunks", chunks, "--no-ppl"]
        command += ["-t", options.threads, *(["--device", "none"] if device == "cpu" else [])]
        llamacpp.call("llama-imatrix", *command, cwd=folder)
        if not (folder / quantizer.IMATRIX).exists():
            raise UserError(f"{options.base}: llama-imatrix wrote nothing; its messages are in the log")
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        tokens_of_experts, width = quantizer.expert_tokens(folder)
        manifest.write(
            folder,
            format="imatrix",
            tool="llama.cpp",
            tool_version=llamacpp.build()["sources"],
            parameters={"samples": chunks, "sequence_length": length},
            source=origin["source"],
            calibration_sha256=tokens.text_sha256,
            experts=experts.facts(tokens_of_experts, width) if tokens_of_experts else None,
            peak_memory_bytes=manifest.peak_rss_bytes(children=True),
        )
