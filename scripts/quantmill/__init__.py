"""Quantmill: one room a concern, each importing only rooms below it (pyproject.toml holds the order)."""
