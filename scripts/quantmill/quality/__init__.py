"""What an engine predicts over a text, chunk by chunk, and whether that can be right; above engines."""
