"""Perplexity, divergence and latency statistics: pure functions over numbers, no engine and no file.

A result file carries METRICS_VERSION; the report refuses to put results of different versions side by side.

1: gptq-2048 perplexity; KL divergence and top-1 agreement; TTFT, TPOT, tokens/s.
2: llamacpp-512, hf-strided, lm-eval-word; change of the right token's probability; the noise floor.
3: the interval of tokens/s widened to Student's t, up to the fastest part of the measurement; unsteady rows marked.
"""

METRICS_VERSION = 3
COMPARABLE = (2, 3)  # versions of reports that stand side by side: each row has the interval of its own
