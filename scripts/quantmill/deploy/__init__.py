"""The command that serves a row as it was measured."""
