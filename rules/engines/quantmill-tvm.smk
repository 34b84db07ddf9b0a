"""MLC's weights, run by Quantmill's own kernels through Apache TVM. It is not MLC-LLM."""

ENGINES["quantmill-tvm"] = Engine(env="mlc", loads=("mlc",))
