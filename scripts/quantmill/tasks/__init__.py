"""Tasks of lm-evaluation-harness: its data, its requests answered by our engines, and the results.

Everything but the worker runs in envs/lm-eval alone. scripts/quantmill/metrics/flips.py compares two results.
"""
