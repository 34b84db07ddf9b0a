"""Write what transformers predicts from a model's weights, with which every engine's predictions are compared.

    python scripts/quantmill gate.expected SOURCE OUT --evaluation evaluation.json [--artifact FOLDER --layout gptq]

SOURCE is the folder of a checkpoint, whose config.json is used; OUT is a JSON file. With --artifact the weights are
that artifact's, as quantmill.layouts reads them; else the source's. They run in float32, on a GPU in float16.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantmill import devices, engines, layouts
from quantmill.checkpoint import shards
from quantmill.common import manifest
from quantmill.common.atomic import write_json
from quantmill.common.program import UserError, parser
from quantmill.engines.decoding.merged import Merged
from quantmill.gate import fidelity
from quantmill.layouts.write_model import write_model
from quantmill.quality import alignment, teacher_forcing
from quantmill.quality.teacher_forcing import Text

WINDOWS = 8  # whose perplexity is compared: a broken artifact is broken everywhere


def predict(
    folder: Path, text: Text, device: str, threads: int, stream: bool, artifact: Path | None, layout: str
) -> dict[str, Any]:
    """Return what transformers predicts for a text with the model in a folder, which has the weights of `artifact`.

    Without an artifact the weights are the source's. Then the predictions after short pieces of the text are returned
    too (`quality.alignment`). `stream`: the model runs block by block.
    """
    engine = engines.load("transformers", folder, device, threads, stream=stream)
    engine.read_ahead([*text.inputs(), *([] if artifact else alignment.texts(folder, text.ids, None))])
    found = fidelity.Predictions(engine, text)
    noise = {}
    if artifact and (round_input := layouts.rounding(layout, artifact)):
        round_inputs(engine.model, round_input)  # type: ignore[attr-defined]  # transformers' has it
        engine.read_ahead(text.inputs())
        rounded = fidelity.Predictions(engine, text, found.as_json())
        noise = {"rounding": float(fidelity.divergence(found.as_json(), rounded).mean())}
    return {
        **noise,
        "perplexity": found.perplexity,
        "windows": len(text.windows),
        "compute_type": engine.compute_type,
        "compared_perplexity": float(np.exp(found.nll[: fidelity.count_positions(text)].mean())),
        **({} if artifact else alignment.examine(engine, folder, text.ids, None)),
        **found.as_json(),
    }


def round_inputs(model: torch.nn.Module, round_input: Callable[[str, Any], Any]) -> None:
    """Round the input of each linear layer as its format does (`layouts.rounding`). Layers that a GPU's engine merged
    have one input, which is rounded as the first of them says."""
    firsts = {id(each.layer): each.names[0] for each in model.modules() if isinstance(each, Merged)}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            name = firsts.get(id(module), path)

            def hook(_: torch.nn.Module, inputs: tuple[Any, ...], name: str = name) -> tuple[Any, ...]:
                return (round_input(name, inputs[0]), *inputs[1:])

            module.register_forward_pre_hook(hook)


def main() -> None:
    arguments = parser(__doc__)
    teacher_forcing.add_text_arguments(arguments, "source")
    devices.add_arguments(arguments)
    arguments.add_argument("--artifact", type=Path, help="the weights' artifact; default: the source")
    arguments.add_argument("--layout", help="how it stores them: a module of quantmill.layouts")
    options = arguments.parse_args()

    source = shards.find(options.source)
    if not options.artifact and (options.source / manifest.NAME).exists():
        manifest.read_checked(options.source)
    device = devices.resolve(options.device)
    text = teacher_forcing.read_text(options.evaluation, options.protocol)
    text = text.first(fidelity.WINDOWS if options.artifact else WINDOWS)
    folder = options.out.with_name(f".{options.out.name}.model")
    shutil.rmtree(folder, ignore_errors=True)  # of a job that was killed
    try:
        reading = layouts.module(options.layout).read(options.artifact, source) if options.artifact else None
        own_head = bool(options.artifact) and layouts.own_head(options.layout, options.artifact)
        write_model(folder, source, reading, "F32" if device == "cpu" else "F16", own_head)
        running = device, options.threads, options.stream
        found = predict(folder, text, *running, options.artifact, options.layout)
        found["against"] = "its own weights" if options.artifact else "the source's weights"
    except UserError as error:
        raise UserError(str(error).replace(str(folder), str(options.source))) from None
    except layouts.Unread as reason:
        found = {"unread": str(reason)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_json(options.out, found | {"protocol": options.protocol})
