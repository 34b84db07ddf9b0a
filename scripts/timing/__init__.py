"""What one fresh process of latency.py measures: tokens with their times, longer prompts, batches."""
