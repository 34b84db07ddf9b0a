"""What the programs that quantize share: how a tool is called, and how what it saved becomes an artifact."""

import argparse
import gc
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quantmill import devices
from quantmill.build import check_parameters, parser
from quantmill.build.quantizer import calibration, linear_layers
from quantmill.build.quantizer.calibration import Calibration
from quantmill.checkpoint import is_mixture, reads_more_than_text, safetensors_file, sharding, shards
from quantmill.checkpoint.conversion import drop_tied
from quantmill.checkpoint.copying import copy
from quantmill.checkpoint.float16 import BeyondFloat16, stored_dtype, write_float16
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import DTYPE_BYTES, Tensor
from quantmill.common import manifest, program, remote_code
from quantmill.common.atomic import clone_or_copy, work_folder, write_atomically
from quantmill.common.model_config import of_text
from quantmill.common.program import UserError, first_line, printable, run_child
from quantmill.gate import quality_gate

remote_code.forbid()

SHARD_BYTES = 5 * 10**9
GPTQ = ("bits", "group_size", "sym", "desc_act", "damp_percent")
# auto-gptq's names for the files of a run, and a key of its that gptqmodel refuses whatever its value
NOT_PORTABLE = ("meta", "model_name_or_path", "model_file_base_name", "is_marlin_format")


@dataclass(frozen=True)
class BuildTask:
    """What a tool is to do: quantize `src` as `parameters` say, on `calibration` where the format has one, and save to
    `saved`.

    `experts`: of a mixture, which of them the calibration reaches (see quantization.experts).

    What it writes to `resume` while it works is there again when the job is started again after it was killed. `facts`
    are those of the manifest, whose `tool` and `tool_version` may be set where there are several.
    """

    src: Path
    saved: Path
    resume: Path
    parameters: dict[str, Any]
    calibration: Calibration | None
    device: str
    dtype: torch.dtype
    facts: dict[str, str]
    experts: dict[str, Any] | None = None

    def sample_inputs(self) -> list[dict[str, torch.Tensor]]:
        """The calibration samples as a model takes them; [1, length] each."""
        samples = self.calibration.samples if self.calibration else []
        tensors = [torch.tensor([ids]) for ids in samples]
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tensors]


@dataclass(frozen=True)
class Tool:
    """A tool that quantizes a model of transformers and saves it.

    name: of its package. quantize: calls it. parameters, optional: names of what it is told, in its own words.
    group_size: the parameter that may be `auto`, where there is one. calibrated: whether it wants a calibration; None:
    some of its formats do. cast: which tensors that are floats are stored in float16, given the parameters too.
    """

    name: str
    quantize: Callable[[BuildTask], None]
    parameters: tuple[str, ...]
    optional: tuple[str, ...] = ()
    group_size: str | None = None
    calibrated: bool | None = True
    cast: Callable[[Tensor, Mapping[str, Any]], bool] = lambda tensor, _: True

    def build(self, doc: str | None) -> None:
        """Read the program's arguments, quantize, and write the artifact.

        Raises `UserError` where a parameter or the calibration does not fit, and for whatever the tool raises.
        """
        arguments = parser(doc or "")
        arguments.add_argument("--calibration", type=Path, help="what tokens.tokenize_texts wrote")
        arguments.add_argument("--evaluation", type=Path, help="the same, of the evaluation text")
        arguments.add_argument("--samples", type=int, default=128)
        arguments.add_argument("--sequence-length", type=int, default=2048)
        options = arguments.parse_args()
        source = shards.find(options.src)
        manifest.read_checked(options.src)
        parameters = check_parameters(options.parameters, self.parameters, self.optional)
        if self.group_size in parameters:
            linear = linear_layers.linear_layers(source.tensors())
            asked = str(parameters[self.group_size])
            parameters[self.group_size] = linear_layers.group_size(asked, linear, options.src)
        samples = None
        if options.calibration and options.evaluation:
            samples = calibration.read(
                options.calibration,
                options.evaluation,
                samples=options.samples,
                sequence_length=options.sequence_length,
                seed=options.seed,
            )
        elif self.calibrated:
            raise UserError(f"{options.dst}: is calibrated; name --calibration and --evaluation")
        device = devices.resolve(options.device)
        torch.manual_seed(options.seed)
        # its own choice is one thread a physical core, and sums over other pieces have other last bits
        torch.set_num_threads(options.threads)
        if device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autoawq takes whatever card it sees
        tool_version = version(self.name)
        with write_atomically(options.dst, source=options.src) as folder, work_folder(options.dst) as saved:
            resume = resume_folder(options, source, parameters, samples, device, tool_version)
            folder.mkdir()
            dtype = torch.float32 if device == "cpu" else torch.float16
            facts = {"format": options.format or options.dst.name, "engine": options.engine}
            facts |= {"tool": self.name, "tool_version": tool_version}
            experts = count_experts(options, saved) if samples and is_mixture(of_text(source.config())) else None
            task = BuildTask(options.src, saved, resume, parameters, samples, device, dtype, facts, experts)
            try:
                self.quantize(task)
            except Exception as error:  # whatever transformers and the tools raise for models that they do not know
                if isinstance(error, OSError) and error.errno in program.FULL:  # not the tool's fault
                    raise
                again = f"; to start from the beginning, remove {resume}" if resume.exists() else ""
                why = f"{facts['tool']} cannot quantize it ({first_line(error)}){again}"
                raise UserError(f"{options.src}: {why}") from error
            gc.collect()  # models are cycles; the gate's process wants the card
            if device == "cuda":
                torch.cuda.empty_cache()
            write_artifact(folder, task, source, options, lambda tensor: self.cast(tensor, task.parameters))
        shutil.rmtree(resume, ignore_errors=True)


def count_experts(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Which experts of a mixture the calibration reaches, found in a process whose memory is free again before a tool
    starts; why that is unknown, where it cannot be found."""
    out = work / "experts.json"
    words = ("calibration", "evaluation", "samples", "sequence_length", "seed", "device", "threads")
    flags = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in words]
    result = run_child([*program.command("build.count_experts", options.gate_python), options.src, out, *flags])
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it was killed; memory short?"])[-1]
        return {"unknown": printable(last.removeprefix("error: "))}
    found = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return found


def resume_folder(
    options: argparse.Namespace,
    source: Checkpoint,
    parameters: Mapping[str, Any],
    samples: Calibration | None,
    device: str,
    tool_version: str,
) -> Path:
    """Where a tool keeps its progress: beside the artifact, and another folder for whatever would be another result.

    Progress of other jobs for the same artifact is removed: nobody will go on with it.
    """
    job = [
        parameters,
        samples.samples if samples else [],
        options.seed,
        torch.cuda.get_device_name() if device == "cuda" else device,
        {"tool": tool_version, "torch": torch.__version__, "transformers": version("transformers")},
        manifest.read(source.folder)["files"],
    ]
    digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
    name = f".{options.dst.name}.resume"
    folder = options.dst.with_name(f"{name}-{digest[:16]}")
    for other in options.dst.parent.glob(f"{name}-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def portable(quantization: dict[str, Any]) -> dict[str, Any]:
    """A quantization_config without what is of one run alone and what another tool refuses to load.

    Of `meta` the quantizer's name and version stay: gptqmodel loads GPTQ that is not symmetric by its own hand alone.
    """
    kept = {key: value for key, value in quantization.items() if key not in NOT_PORTABLE}
    quantizer = quantization.get("meta", {}).get("quantizer")
    return kept | ({"meta": {"quantizer": quantizer}} if quantizer else {})


def write_artifact(
    folder: Path,
    job: BuildTask,
    source: Checkpoint,
    options: argparse.Namespace,
    cast: Callable[[Tensor], bool],
) -> None:
    """Write what a tool saved as an artifact that has passed the quality gate.

    Weights that were not quantized are stored in float16 again, the config is the source's with the tool's
    quantization_config added, and all else is carried over: what a tool writes beside that (paths of temporary folders,
    a cache that is off, rope_theta in one spelling) differs from run to run, or makes it another model. auto-gptq reads
    a local folder's quantize_config.json alone, so that GPTQ's is written there too.

    `cast`: see `Tool`.
    """
    written = shards.find(job.saved)
    tensors = drop_tied(source.config(), written.tensors())  # auto-gptq writes a tied head once more
    groups = sharding.split(list(tensors.values()), SHARD_BYTES)
    notes = {key: value for file in written.files for key, value in safetensors_file.notes(file).items()}

    def dtype(tensor: Tensor) -> str:
        return stored_dtype(tensor) if cast(tensor) else tensor.dtype

    def write(tensor: Tensor, target: io.FileIO) -> None:
        (write_float16 if cast(tensor) else copy)(tensor, target)

    write_file = partial(safetensors_file.write, dtype=dtype, copy=write, notes=notes)
    try:
        names = sharding.write(folder, "safetensors", groups, write_file)
    except BeyondFloat16 as error:  # which names the tool's file, that will be gone
        raise UserError(f"{source.folder}: {str(error).partition(': ')[2]}") from None
    quantization = portable(written.config()["quantization_config"])
    method = quantization["quant_method"]
    config = source.config() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if method == "gptq":
        (folder / "quantize_config.json").write_text(json.dumps(quantization, indent=2) + "\n", encoding="utf-8")
    for path in source.others():
        if path.name != "config.json":
            clone_or_copy(path, folder / path.name)
    gate = quality_gate.check(folder, options.engine, options.layout, job.device, options, options.engine_python)
    origin = manifest.read(source.folder)
    stored = {name: tensor.numel * DTYPE_BYTES[dtype(tensor)] for name, tensor in tensors.items()}
    calibrated = job.calibration and {
        "samples": len(job.calibration.samples),
        "sequence_length": job.calibration.sequence_length,
    }
    towers = any(map(reads_more_than_text, tensors))
    run = {"seed": options.seed, "device": job.device, "threads": options.threads}
    manifest.write(
        folder,
        **job.facts,
        parameters={**job.parameters, **run, **(calibrated or {})},
        source=origin["source"],
        # a tool that loads the language model alone saves nothing else
        parameter_count=origin["parameter_count"] if towers else shards.text_parameters(source.folder),
        weight_files=list(names),
        weight_bytes_per_token=shards.bytes_read(stored, config),
        calibration_sha256=job.calibration.sha256 if job.calibration else None,
        gate=gate,
        experts=job.experts,
    )
