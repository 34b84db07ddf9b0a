"""Tasks by lm-evaluation-harness: its data, its requests answered by our engines, and what a result keeps of them.

All of it runs in envs/lm-eval, and only there. scripts/quantmill/metrics/flips.py compares what two results hold.
"""
