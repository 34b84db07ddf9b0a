"""One of several processes of llm-compressor, each with a GPU and a share of the samples.

build.llmcompressor starts them.
"""

import torch
from compressed_tensors.offload import load_offloaded_model
from transformers import AutoModelForCausalLM

from quantmill.build.llmcompressor import compress
from quantmill.build.quantizer import ranks
from quantmill.build.quantizer.program import BuildTask


def work(task: BuildTask) -> None:
    """Load the model together with the other processes, which get its weights from the first one, and quantize it."""
    where = "cpu"
    if task.gpu.placement.weights == "gpu" and task.device == "cuda":
        where = f"cuda:{torch.distributed.get_rank()}"
    with load_offloaded_model():
        model = AutoModelForCausalLM.from_pretrained(task.src, dtype=task.dtype, device_map=where, max_memory={})
    compress(task, model)


def main() -> None:
    ranks.answer(work)
