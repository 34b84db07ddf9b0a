"""MLC's weights, run by Quantmill's own kernels through Apache TVM. It is not MLC-LLM."""

ENGINES["quantmill-tvm"] = Engine(
    env="mlc", loads=("mlc",), resources=RunResources(cpu=122, weights=0.57, floor=725, cuda=725, logits=16)
)
