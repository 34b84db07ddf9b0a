"""Write the reference's logits over the evaluation text, with which every other format is compared.

    python scripts/quantmill quality.reference_logits ARTIFACT OUT.npy --engine transformers --evaluation
        evaluation.json

OUT is a float16 array [scored positions, vocab], shifted row by row (`quality.reference`); `-` writes it to standard
output. A file's size is compared with the free disk before it is written.
"""

import os
import sys

from quantmill import devices, engines
from quantmill.common import manifest
from quantmill.common.atomic import write_atomically
from quantmill.common.program import UserError, parser
from quantmill.quality import reference, teacher_forcing


def main() -> None:
    arguments = parser(__doc__)
    teacher_forcing.add_arguments(arguments)
    options = arguments.parse_args()

    manifest.read_unchanged(options.artifact)  # before any work
    device = devices.resolve(options.device, gpus=options.gpus)
    text = teacher_forcing.read_text(options.evaluation, options.protocol)
    to_stdout = str(options.out) == "-"
    if to_stdout:  # a library's output must not get between the logits
        out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engine = engines.load(options.engine, options.artifact, device, options.threads, options.gpus, **options.options)
    if "logits" not in engine.capabilities:
        raise UserError(f"engine {options.engine} returns no logits, so that nothing can be compared with it")
    if to_stdout:
        with out:
            reference.write(engine, text, out, None)
        return
    with write_atomically(options.out) as partial, partial.open("wb") as file:
        reference.write(engine, text, file, partial.parent)
