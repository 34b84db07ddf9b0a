"""What of a source's files goes on into artifacts: nothing that names a program, a kernel of some machine, or another
quantization."""

from typing import Any

# auto_map names Python, which is not carried along; the others a kernel of somebody's machine, or of the hub's
NOT_CARRIED = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "use_kernels")


def config(content: Any) -> Any:
    """A config.json without the keys of `NOT_CARRIED`, whatever part of it they stand in."""
    if isinstance(content, dict):
        return {key: config(value) for key, value in content.items() if key not in NOT_CARRIED}
    return [config(value) for value in content] if isinstance(content, list) else content
