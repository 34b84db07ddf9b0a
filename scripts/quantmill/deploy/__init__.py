"""The commands that serve a row as it was measured."""
