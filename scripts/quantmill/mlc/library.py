"""Compile a model library: the architecture for a target, without any weights."""

import hashlib
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

from quantmill.mlc import without_torch

with without_torch():
    import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.backend.cuda import pipeline
from tvm.s_tir.dlight import ApplyDefaultSchedule, gpu
from tvm.support.cc import get_cc
from tvm.target import Target, codegen

from quantmill.common.code_hash import closure
from quantmill.common.program import PACKAGE, UserError, first_line
from quantmill.devices import cpu as processor
from quantmill.mlc import cpu, cuda
from quantmill.mlc.architecture import Architecture

CUDA_THREADS = 1024
CUDA_SHARED_BYTES = 48 * 1024
TENSOR_CORES = 80  # compute capability of mma.m16n8k16
DEPENDENT_LAUNCH = 90
WARPGROUPS = "sm_90a"  # instructions of this GPU alone


def cpu_target() -> Target:
    """Return this machine's processor as the target; a generic target was 31 times slower."""
    return Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu()})


def cuda_target(arch: str | None) -> Target:
    """Return a GPU as the target, by its architecture (`sm_90`) or the one here.

    Raises `UserError` if none is here and none is named.
    """
    if arch is None:
        device = tvm.cuda()
        if not device.exist:
            raise UserError("device cuda: TVM sees no GPU to compile for; name one with --arch sm_90a")
        arch = "sm_" + device.compute_version.replace(".", "")
        arch = WARPGROUPS if f"{arch}a" == WARPGROUPS else arch
    limits = {"max_threads_per_block": CUDA_THREADS, "max_shared_memory_per_block": CUDA_SHARED_BYTES}
    # any processor launches kernels
    target = Target({"kind": "cuda", "arch": arch, "thread_warp_size": 32, **limits, "host": {"kind": "llvm"}})
    if capability(target) < TENSOR_CORES:
        raise UserError(f"device cuda: {arch} is older than sm_{TENSOR_CORES}, which mlc-q4f16_1's kernels need")
    return target


def cuda_passes(target: Target) -> tvm.transform.Pass:
    """Return TVM's passes for CUDA, but with reshapes as views before they are fused into kernels that copy."""
    schedules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
    return tvm.transform.Sequential(
        [
            *pipeline.library_dispatch_passes(target),
            relax.transform.LegalizeOps(),
            relax.transform.RewriteDataflowReshape(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            ApplyDefaultSchedule(*schedules),
            launches(target),
            *pipeline.dataflow_lower_passes(target),
            *pipeline.finalize_passes(target),
        ]
    )


def launches(target: Target) -> tvm.transform.Pass:
    """Return a pass that launches our kernels plainly if the GPU has no dependent launches."""

    @tvm.tirx.transform.prim_func_pass(opt_level=0)
    def change(function: tvm.tirx.PrimFunc, *_: object) -> tvm.tirx.PrimFunc:
        dependent = capability(target) >= DEPENDENT_LAUNCH
        return function if dependent else function.without_attr("tirx.kernel_launch_params")

    return change


def capability(target: Target) -> int:
    """Return the compute capability as a number: 90 for sm_90 and sm_90a."""
    return int(re.sub(r"\D", "", str(target.attrs["arch"])))


def features(target: Target) -> list[str]:
    """List the vector instructions that a library for a target needs."""
    return processor.features() if target.kind.name == "llvm" else []


def key(shape: Architecture, target: Target) -> str:
    """Hash of architecture, target, TVM and the model's definition: the library's name in the cache."""
    definition = b"".join(path.read_bytes() for path in closure(Path(__file__), PACKAGE.parent))
    parts = [asdict(shape), str(target), features(target), tvm.__version__, tvm_ffi.__version__]
    return hashlib.sha256(json.dumps(parts).encode() + definition).hexdigest()[:32]


def compile(shape: Architecture, target: Target, out: Path) -> None:
    """Write the library to `out`.

    Without a CUDA driver, a library for CUDA contains source, which nvcc compiles whenever it is loaded. Raises
    `UserError` if there is no C++ compiler, or no nvcc.
    """
    if get_cc() is None:
        raise UserError("the model library needs a C++ compiler to link it (g++ or clang++ on PATH); install one")
    device = "cuda" if target.kind.name == "cuda" else "cpu"
    model = cuda.Model(shape, str(target.attrs["arch"]) == WARPGROUPS) if device == "cuda" else cpu.Model(shape)
    module, parameters = model.export_tvm(spec=model.get_default_spec())[:2]
    assert [name for name, _ in parameters] == list(shape.parameters()), "parameters are not in the model's order"
    metadata = {
        "architecture": asdict(shape),
        "device": device,
        "target": str(target.attrs.get("mcpu", target.attrs.get("arch"))),
        "features": features(target),
    }
    builder = relax.BlockBuilder(module)
    with builder.function("metadata", []):
        builder.emit_func_output(tvm.ir.StringImm(json.dumps(metadata)))
    os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")
    with target:
        try:
            passes = "default" if device == "cpu" else cuda_passes(target)
            tvm.compile(builder.finalize(), target, relax_pipeline=passes).export_library(str(out))
        except Exception as error:  # whatever TVM, nvcc and the linker raise
            raise UserError(
                f"TVM {tvm.__version__} cannot compile the model library ({first_line(error)}); "
                + ("it needs nvcc on PATH" if device == "cuda" else "leave mlc-q4f16_1 out of this model's formats")
            ) from None
