"""Keys of a config.json that are not copied into artifacts: they name code, kernels or another quantization."""

from typing import Any

# auto_map names Python code, which is not copied; the others name a kernel of one machine or of the hub
NOT_CARRIED = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "use_kernels")


def config(content: Any) -> Any:
    """Return a config.json without the keys of `NOT_CARRIED`, at any depth."""
    if isinstance(content, dict):
        return {key: config(value) for key, value in content.items() if key not in NOT_CARRIED}
    return [config(value) for value in content] if isinstance(content, list) else content
