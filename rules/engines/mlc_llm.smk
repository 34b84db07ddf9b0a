"""MLC-LLM itself, where `interpreters.mlc_llm` names a Python that has it."""

ENGINES["mlc_llm"] = Engine(env="mlc_llm", loads=("mlc",), options={"mode": {"type": "string"}})
