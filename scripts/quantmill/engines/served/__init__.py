"""Shared parts of engines that are servers: those that Quantmill starts, and those found at a URL."""
