"""Count the calibration tokens that each expert of a mixture sees, as transformers routes them.

    python scripts/quantmill build.count_experts MODEL OUT --calibration calibration.json --evaluation evaluation.json
        --samples 128 --sequence-length 2048 [--seed 0]

MODEL is the fp16 artifact; the programs that quantize run it before they calibrate on the same samples. A router sends
each token to a few experts. For an expert that no token reaches, a tool has nothing to calibrate on and does not say
so: gptqmodel, for example, then rounds its weights to the nearest.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quantmill import devices, engines
from quantmill.build.quantizer import calibration
from quantmill.build.quantizer.experts import facts
from quantmill.common.atomic import write_json
from quantmill.common.program import parser

NAME = "experts"  # of the module that holds a layer's, in transformers


class Counts:
    """Counts of tokens that a model's experts see from now on, by the layer's module and the expert's number."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tokens: dict[str, torch.Tensor] = {}
        self.width = 0  # of a token's state
        for path, module in model.named_modules():
            if path.rpartition(".")[2] != NAME:
                continue
            if isinstance(module, torch.nn.ModuleList):  # transformers 4: a module each
                self.tokens[path] = torch.zeros(len(module), dtype=torch.long)
                for number, expert in enumerate(module):
                    expert.register_forward_pre_hook(self._of_one(path, number), with_kwargs=True)
            else:  # 5: one for all, which gets each token's experts
                module.register_forward_pre_hook(self._of_all(path), with_kwargs=True)

    def _of_one(self, path: str, number: int) -> Callable[..., None]:
        def count(_: torch.nn.Module, inputs: tuple[Any, ...], words: dict[str, Any]) -> None:
            rows = next(each for each in (*inputs, *words.values()) if torch.is_tensor(each))
            self.width = rows.shape[-1]
            self.tokens[path][number] += rows.numel() // self.width

        return count

    def _of_all(self, path: str) -> Callable[..., None]:
        def count(module: torch.nn.Module, inputs: tuple[Any, ...], words: dict[str, Any]) -> None:
            given = [each for each in (*inputs, *words.values()) if torch.is_tensor(each)]
            chosen = [each for each in given if each.dtype == torch.long]
            self.width = given[0].shape[-1]
            experts = getattr(module, "num_experts", None) or len(next(module.parameters()))
            if chosen:
                found = torch.bincount(chosen[0].flatten().cpu(), minlength=experts)[:experts]
                self.tokens[path] = self.tokens.get(path, 0) + found

        return count

    def as_json(self) -> dict[str, Any]:
        """Return the `facts` of the experts, or why they are unknown."""
        tokens = {path: counts.tolist() for path, counts in self.tokens.items()}
        if not any(map(any, tokens.values())):
            return {"unknown": "its routers do not say where they send a token"}
        return facts(tokens, self.width)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", type=Path, help="folder of the fp16 artifact")
    arguments.add_argument("out", type=Path, help="JSON file to write")
    calibration.add_arguments(arguments)
    arguments.add_argument("--seed", type=int, default=0)
    devices.add_arguments(arguments)
    options = arguments.parse_args()

    device = devices.resolve(options.device)
    model = engines.load("transformers", options.model, device, options.threads).model  # type: ignore[attr-defined]  # transformers' has it
    counts = Counts(model)
    with torch.inference_mode():
        for ids in calibration.of_options(options).samples:
            model(input_ids=torch.tensor([ids], device=device), use_cache=False, logits_to_keep=1)
    write_json(options.out, counts.as_json())
