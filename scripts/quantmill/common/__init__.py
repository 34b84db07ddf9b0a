"""What the programs share that is neither a format, nor an engine, nor a metric."""
