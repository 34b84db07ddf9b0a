"""Fetch a model, a text or a prebuilt artifact, from a folder or from the hub."""
