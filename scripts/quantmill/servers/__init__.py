"""Processes of servers: start, supervise and end them, and vLLM's settings."""
