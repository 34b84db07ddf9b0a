"""CUDA kernels of Quantmill's in a TVM library: a loop nest of blocks and threads around one device function.

TVM writes the source of the function before the module's kernels. Only `launch` depends on CUDA: a test replaces it,
and runs the same sources on a CPU.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.relax.frontend.nn import Tensor, op
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

# A dependent launch: a kernel starts while the one before it runs, and waits before it reads that one's results
LAUNCH = ["blockIdx.x", "threadIdx.x", "tirx.use_programtic_dependent_launch"]
DYNAMIC = "tirx.use_dyn_shared_memory"  # TVM requires it last

SOURCE = Path(__file__).with_suffix(".cuh").read_text(encoding="utf-8")
Buffer = tuple[Sequence[Any], str]

OPAQUE = 8  # not to be fused; tvm.relax.op_attrs.OpPatternKind


def include_guard(name: str, source: str) -> str:
    """Guard a source, so that a module may include it many times."""
    return f"#ifndef {name}\n#define {name}\n{source}\n#endif\n"


def launch(function: str, source: str, arguments: Sequence[Any], grid: Any, threads: int, shared: int) -> None:
    """Emit `function(*arguments)` for `grid` blocks of `threads`, into the loop nest that is being built.

    If `shared` is not 0, the last argument is the address of that many bytes of shared memory.
    """
    if shared:
        arguments = [*arguments, T.sblock_alloc_buffer([shared], "uint8", scope="shared.dyn").data]
    source = include_guard("MLC_KERNEL", SOURCE) + source
    with T.thread_binding(0, grid, thread="blockIdx.x"), T.thread_binding(0, threads, thread="threadIdx.x"):
        T.evaluate(cuda_func_call(function, *arguments, source_code=source))


def kernel(
    function: str,
    source: str,
    parameters: Mapping[str, Buffer | None],
    grid: Any,
    threads: int,
    integers: Sequence[str] = (),
    shared: int = 0,
) -> tirx.PrimFunc:
    """Return a scheduled function of `parameters`: name -> shape and dtype, or None for an integer.

    Strings in a shape name sizes. The device function gets the buffers' addresses, then the `integers`, which are sizes
    or parameters, then the address of `shared` bytes of shared memory, which may exceed CUDA's 48 KiB. `grid` is a
    number of blocks, or a function of sizes by name.
    """
    params = LAUNCH and LAUNCH + [DYNAMIC] * bool(shared)
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_name("kernel")
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "tirx.kernel_launch_params": params})
        T.func_attr({"op_pattern": OPAQUE})
        given = {name: T.arg(name, T.handle() if wanted else T.int64()) for name, wanted in parameters.items()}
        buffers = {name: wanted for name, wanted in parameters.items() if wanted}
        sizes = {size: T.int64() for shape, _ in buffers.values() for size in shape if isinstance(size, str)}
        data = [
            T.match_buffer(given[name], [sizes.get(size, size) for size in shape], dtype).data
            for name, (shape, dtype) in buffers.items()
        ]
        with T.sblock("root"):
            T.reads()
            T.writes()
            more = [T.Cast("int32", sizes[name] if name in sizes else given[name]) for name in integers]
            launch(function, source, data + more, grid(sizes) if callable(grid) else grid, threads, shared)
    return builder.get()


def call(
    name: str, function: tirx.PrimFunc, arguments: Sequence[Any], outputs: Sequence[Tensor], changed: Sequence[int] = ()
) -> Any:
    """Call a kernel. Return the arguments that it changes, by their numbers, and then its outputs."""
    if not changed:
        return op.tensor_ir_op(function, name, list(arguments), outputs[0] if len(outputs) == 1 else list(outputs))
    indices = [*changed, *(-1 for _ in outputs)]
    results = [arguments[number] for number in changed] + list(outputs)
    return op.tensor_ir_inplace_op(
        function, name, list(arguments), indices, results[0] if len(results) == 1 else results
    )
