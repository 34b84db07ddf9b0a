"""MLC-LLM's format q4f16_1: its weights without TVM, and the model library that runs them, made by TVM."""
