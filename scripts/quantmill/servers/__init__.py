"""Servers under load: start them, send requests, read their streams, and say whether the figures can be trusted.

client sends a load and keeps bytes with their times; stream reads them after the run; checks and agreement say what is
wrong; metrics.serving computes the figures. Standard library and numpy alone, so that it runs in any environment.
"""
