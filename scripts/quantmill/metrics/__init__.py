"""Statistics of quality and speed: pure functions of numbers, without engines and files.

A result file carries METRICS_VERSION; the report does not compare results of different versions.

1: gptq-2048 perplexity; KL divergence and top-1 agreement; TTFT, TPOT, tokens/s.
2: llamacpp-512, hf-strided, lm-eval-word; change of the correct token's probability; the noise floor.
3: the interval of tokens/s by Student's t, up to the fastest part of the measurement; marks of unsteady rows.
"""

METRICS_VERSION = 3
COMPARABLE = (2, 3)  # versions of reports that may be compared: each row has its own interval
