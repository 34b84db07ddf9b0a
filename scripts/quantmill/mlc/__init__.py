"""MLC-LLM's format q4f16_1: its weights without TVM, and the model library that runs them, made by TVM."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_torch() -> Iterator[None]:
    """Import TVM as where torch is not installed. It would import torch, which takes seconds and hundreds of megabytes,
    and is here only to compare logits on a GPU."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if sys.modules["torch"] is None:
            del sys.modules["torch"]
