"""Run llama.cpp's converter, with a name for a pre-tokenizer that it does not know.

    python scripts/quantmill llamacpp.convert PRE MODEL --outfile FILE …

Its file runs unchanged. Where it refuses a tokenizer because its list lacks it, PRE is taken; the caller proves that
PRE makes the tokenizer's ids (`llamacpp.vocabulary`). With PRE `none` the converter writes no tokenizer. No Python code
of a model runs.
"""

import importlib
import runpy
import sys
from typing import Any

from quantmill import llamacpp
from quantmill.common import remote_code
from quantmill.llamacpp import vocabulary


def main() -> None:
    source = llamacpp.folder() / "source"
    pre, *arguments = sys.argv[1:]
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    base = importlib.import_module("conversion.base")
    conversion: Any = importlib.import_module("conversion")
    listed, find = base.TextModel.get_vocab_base_pre, conversion.get_model_class

    def name(self: Any, tokenizer: Any) -> str:
        try:
            return listed(self, tokenizer)
        except NotImplementedError:
            return pre

    def without_vocabulary(*arguments: Any, **options: Any) -> Any:
        kind = find(*arguments, **options)
        kind.set_vocab = kind._set_vocab_none
        return kind

    base.TextModel.get_vocab_base_pre = name
    if pre == vocabulary.NONE:
        conversion.get_model_class = without_vocabulary
    remote_code.forbid()
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")
