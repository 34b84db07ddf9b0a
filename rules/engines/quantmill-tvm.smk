"""MLC's weights, run by Quantmill's own kernels through Apache TVM. It is not MLC-LLM."""

ENGINES["quantmill-tvm"] = Engine(
    env="mlc", loads=("mlc",), resources=RunResources(cpu=122, cuda=725, start=3, block=0.00002, logits=16)
)
