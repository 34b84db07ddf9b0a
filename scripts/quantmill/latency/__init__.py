"""How fast an engine decodes an artifact, one request at a time; longer prompts; batches."""
