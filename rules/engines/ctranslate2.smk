"""CTranslate2's Generator."""

ENGINES["ctranslate2"] = Engine(
    env="torch",
    loads=("ct2",),
    options={"compute_type": {"type": "string"}},
    resources=RunResources(cpu=97, weights=4, quantized=1, floor=670, cuda=450, logits=16),
)
