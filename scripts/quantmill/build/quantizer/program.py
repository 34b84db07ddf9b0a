"""The program of all tools that quantize: it calls the tool and turns what it saved into an artifact."""

import argparse
import gc
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quantmill import devices
from quantmill.build import check_parameters, finish, parser
from quantmill.build.quantizer import calibration, experts, gpu_memory, linear_layers
from quantmill.build.quantizer.calibration import Calibration
from quantmill.build.quantizer.gpu_memory import GpuMemory
from quantmill.build.quantizer.placement import Placement
from quantmill.checkpoint import finite, is_mixture, reads_more_than_text, safetensors_file, sharding, shards
from quantmill.checkpoint.conversion import drop_tied
from quantmill.checkpoint.copying import copy
from quantmill.checkpoint.float16 import BeyondFloat16, stored_dtype, write_float16
from quantmill.checkpoint.shards import Checkpoint
from quantmill.checkpoint.tensor import DTYPE_BYTES, Tensor
from quantmill.common import manifest, program, remote_code
from quantmill.common.atomic import clone_or_copy, work_folder, write_atomically
from quantmill.common.model_config import of_text
from quantmill.common.program import UserError, first_line

remote_code.forbid()

SHARD_BYTES = 5 * 10**9
GPTQ = ("bits", "group_size", "sym", "desc_act", "damp_percent")
# auto-gptq's names for the files of a run, and a key of its that gptqmodel refuses whatever its value
NOT_PORTABLE = ("meta", "model_name_or_path", "model_file_base_name", "is_marlin_format")


@dataclass(frozen=True)
class BuildTask:
    """A tool's task: quantize `src` as `parameters` say, and save to `saved`.

    calibration: without samples for a format that has none. resume: a folder for the tool's progress, which a job
    finds again after it was killed. facts: the manifest's `tool` and `tool_version`, which a program with a choice of
    tools sets. gpu: what may be on the GPU, or on several.
    """

    src: Path
    saved: Path
    resume: Path
    parameters: dict[str, Any]
    calibration: Calibration
    device: str
    dtype: torch.dtype
    facts: dict[str, Any]
    gpu: GpuMemory = field(default_factory=GpuMemory)

    def sample_inputs(self) -> list[dict[str, torch.Tensor]]:
        """Return the calibration samples as a model takes them; [1, length] each."""
        tensors = [torch.tensor([ids]) for ids in self.calibration.samples]
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tensors]


Cast = Callable[[Tensor, Mapping[str, Any]], bool]


def keep_dtype(tensor: Tensor, parameters: Mapping[str, Any]) -> bool:
    """Store every tensor in the dtype that the tool saved."""
    return False


def in_float16(tensor: Tensor, parameters: Mapping[str, Any]) -> bool:
    """Store every floating-point tensor in float16."""
    return True


@dataclass(frozen=True)
class Tool:
    """A tool that quantizes a model of transformers and saves it; `build` is the program.

    name: of its package. quantize: calls it. parameters, optional: their names, in its own words. group_size: the
    parameter that may be `auto`. calibrated: whether it calibrates, by the parameters where that differs. cast: which
    floating-point tensors are stored in float16, by the parameters. placements: the fastest first; none if it has no
    choice of what it keeps on the GPU. all_experts: whether it calibrates each expert of a mixture on all tokens,
    whatever the router chooses.
    """

    name: str
    quantize: Callable[[BuildTask], None]
    parameters: tuple[str, ...]
    optional: tuple[str, ...] = ()
    group_size: str | None = None
    calibrated: bool | Callable[[Mapping[str, Any]], bool] = True
    cast: Cast = in_float16
    placements: tuple[Placement, ...] = ()
    all_experts: bool = False

    def build(self) -> None:
        """Read the program's arguments, quantize, and write the artifact.

        Raises `UserError` where a parameter or the calibration does not fit, and for whatever the tool raises.
        """
        arguments = parser(sys.modules[self.quantize.__module__].__doc__ or "")
        if self.placements:
            gpu_memory.add_arguments(arguments)
        if self.calibrated is not False:
            calibration.add_arguments(arguments, required=self.calibrated is True)
        options = arguments.parse_args()
        source = shards.find(options.src)
        manifest.read_checked(options.src)
        parameters = check_parameters(options.parameters, self.parameters, self.optional)
        if self.group_size in parameters:
            linear = linear_layers.linear_layers(source.tensors())
            asked = str(parameters[self.group_size])
            parameters[self.group_size] = linear_layers.group_size(asked, linear, options.src)
        calibrated = self.calibrated(parameters) if callable(self.calibrated) else self.calibrated
        if calibrated and None in (options.calibration, options.evaluation, options.samples, options.sequence_length):
            flags = "--calibration, --evaluation, --samples and --sequence-length"
            raise UserError(f"{options.dst}: {self.name} calibrates it; name {flags}")
        samples = calibration.of_options(options) if calibrated else calibration.NONE
        options.device = devices.resolve(options.device, gpus=options.gpus if self.placements else 1)
        torch.manual_seed(options.seed)
        # torch's default is one thread a physical core; other numbers of threads add in another order
        torch.set_num_threads(options.threads)
        if options.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autoawq takes any GPU that it sees
        facts: dict[str, Any] = {"tool": self.name, "tool_version": version(self.name)}
        gpu = gpu_memory.prepare(self.name, self.placements, options, samples)
        with write_atomically(options.dst, source=options.src) as folder, work_folder(options.dst) as saved:
            resume = resume_folder(options, parameters, samples, facts["tool_version"], gpu)
            folder.mkdir()
            dtype = torch.float32 if options.device == "cpu" else torch.float16
            mixture = bool(samples.samples) and is_mixture(of_text(source.config()))
            counted = experts.count(options, saved) | {"all_tokens": self.all_experts} if mixture else None
            task = BuildTask(options.src, saved, resume, parameters, samples, options.device, dtype, facts, gpu)
            try:
                self.quantize(task)
            except Exception as error:  # whatever transformers and the tools raise for models that they do not know
                if isinstance(error, OSError) and error.errno in program.FULL:  # not the tool's fault
                    raise
                again = f"; to start from the beginning, remove {resume}" if resume.exists() else ""
                raise UserError(f"{options.src}: {facts['tool']} {gpu.explain(first_line(error))}{again}") from error
            gc.collect()  # models are reference cycles, and the gate needs the GPU's memory
            if options.device == "cuda":
                torch.cuda.empty_cache()
                facts |= {"placement": gpu.facts()} if self.placements else {}
            write_artifact(folder, task, source, options, lambda tensor: self.cast(tensor, parameters), counted)
        shutil.rmtree(resume, ignore_errors=True)


def quantize_by_transformers(task: BuildTask, config: Any) -> None:
    """Have transformers replace the linear layers as a quantization_config says, and save the model."""
    from transformers import AutoModelForCausalLM  # here: not every tool's environment has it

    words = {"quantization_config": config, "device_map": {"": task.device}, "dtype": "auto"}
    AutoModelForCausalLM.from_pretrained(task.src, **words).save_pretrained(task.saved)


def resume_folder(
    options: argparse.Namespace,
    parameters: Mapping[str, Any],
    samples: Calibration,
    tool_version: str,
    gpu: GpuMemory,
) -> Path:
    """Return the folder for a tool's progress: beside the artifact, and another one for each other result.

    Progress of other jobs for the same artifact is removed, since no job will resume it.
    """
    job = [
        parameters,
        samples.samples,
        options.seed,
        torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        [gpu.placement.weights, gpu.placement.activations, gpu.placement.batch, gpu.gpus],
        {"tool": tool_version, "torch": torch.__version__, "transformers": version("transformers")},
        manifest.read(options.src)["files"],
    ]
    digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
    name = f".{options.dst.name}.resume"
    folder = options.dst.with_name(f"{name}-{digest[:16]}")
    for other in options.dst.parent.glob(f"{name}-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def portable(quantization: dict[str, Any]) -> dict[str, Any]:
    """Return a quantization_config without keys of one run, and keys that another tool refuses to load.

    Of `meta` the quantizer's name and version stay: gptqmodel loads asymmetric GPTQ only from itself.
    """
    kept = {key: value for key, value in quantization.items() if key not in NOT_PORTABLE}
    quantizer = quantization.get("meta", {}).get("quantizer")
    return kept | ({"meta": {"quantizer": quantizer}} if quantizer else {})


def write_artifact(
    folder: Path,
    task: BuildTask,
    source: Checkpoint,
    options: argparse.Namespace,
    cast: Callable[[Tensor], bool],
    counted_experts: dict[str, Any] | None,
) -> None:
    """Write what a tool saved as an artifact that has passed the quality gate.

    Tensors that `cast` names are stored in float16 again. The config is the source's with the tool's
    quantization_config, and all other files are the source's: the tool's own (paths of temporary folders, a disabled
    cache, rope_theta in one spelling) differ from run to run, or make it another model. GPTQ's quantization is also
    written to quantize_config.json, the only file that auto-gptq reads of a local folder.

    Raises `UserError` for experts that were left unquantized, and for numbers that are not finite.
    """
    written = shards.find(task.saved)
    tensors = drop_tied(source.config(), written.tensors())  # auto-gptq stores a tied head a second time
    tool = f"{task.facts['tool']} {task.facts['tool_version']}"
    experts.check_quantized(tool, tensors.values(), options.dst)
    groups = sharding.split(list(tensors.values()), SHARD_BYTES)
    notes = {key: value for file in written.files for key, value in safetensors_file.notes(file).items()}

    def dtype(tensor: Tensor) -> str:
        return stored_dtype(tensor) if cast(tensor) else tensor.dtype

    def write(tensor: Tensor, target: io.FileIO) -> None:
        if (place := finite.first_place(tensor)) is not None:
            raise UserError(
                f"{options.dst}: {tool} made {tensor.name} NaN or infinite at {place}; leave this format out for this "
                "model, or calibrate with more samples"
            )
        (write_float16 if cast(tensor) else copy)(tensor, target)

    write_file = partial(safetensors_file.write, dtype=dtype, copy=write, notes=notes)
    try:
        names = sharding.write(folder, "safetensors", groups, write_file)
    except BeyondFloat16 as error:  # which names a temporary file
        raise UserError(f"{source.folder}: {str(error).partition(': ')[2]}") from None
    quantization = portable(written.config()["quantization_config"])
    config = source.config() | {"quantization_config": quantization}
    configs = {"config.json": config}
    if quantization["quant_method"] == "gptq":
        configs["quantize_config.json"] = quantization
    for name, content in configs.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for path in source.others():
        if path.name != "config.json":
            clone_or_copy(path, folder / path.name)
    samples = task.calibration
    run = {"seed": options.seed, "device": options.device, "threads": options.threads}
    if samples.samples:
        run |= {"samples": len(samples.samples), "sequence_length": samples.sequence_length}
    whole = any(map(reads_more_than_text, tensors))  # some tools save the language model alone
    counted = {"parameter_count": manifest.read(source.folder)["parameter_count"]} if whole else {}
    stored = {name: tensor.numel * DTYPE_BYTES[dtype(tensor)] for name, tensor in tensors.items()}
    finish(
        folder,
        options,
        options.layout,
        **task.facts,
        **counted,
        parameters=task.parameters | run,
        weight_files=list(names),
        weight_bytes_per_token=shards.bytes_read(stored, config),
        calibration_sha256=samples.sha256,
        experts=counted_experts,
    )
