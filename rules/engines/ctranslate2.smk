"""CTranslate2's Generator."""

ENGINES["ctranslate2"] = Engine(
    env="torch",
    loads=("ct2",),
    options={"compute_type": {"type": "string"}},
    resources=RunResources(cpu=130, cuda=600, start=1, block=0.00012, weights=2, quantized=0, logits=16),
)
