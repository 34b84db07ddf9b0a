"""What one fresh process of latency.measure measures: tokens with their times, longer prompts, batches."""
