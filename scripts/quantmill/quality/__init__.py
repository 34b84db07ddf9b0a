"""An engine's predictions over a text, chunk by chunk, and checks that they can be right."""
