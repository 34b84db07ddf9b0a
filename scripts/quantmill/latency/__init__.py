"""The speed of an engine that decodes an artifact: one request at a time, longer prompts, batches."""
