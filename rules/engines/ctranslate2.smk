"""CTranslate2's Generator."""

ENGINES["ctranslate2"] = Engine(env="torch", loads=("ct2",), options={"compute_type": {"type": "string"}})
