"""Artifacts on the hub: what is uploaded, its card, its licence, and what the hub has after it."""

from quantmill.fetch import hub as hub  # before anything imports the client: it says what that one logs
