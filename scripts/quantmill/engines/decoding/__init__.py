"""Decoding in a CUDA graph, and the layers and kernels that are put into a model for it; several engines share it."""
