"""Perplexity, divergence and latency statistics: pure functions over numbers, no engine and no file.

A result file carries METRICS_VERSION; the report refuses to put results of different versions side by side.

1: gptq-2048 perplexity; KL divergence and top-1 agreement; TTFT, TPOT, tokens/s.
"""

METRICS_VERSION = 1
