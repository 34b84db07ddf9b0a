"""A model of transformers that runs block by block: one block's weights are in memory, and the next one's on the way.

Every text goes through a block before the next one is there, so the texts are given together. Memory is that of the
embeddings or the head, two blocks, and the activations of all texts, however many blocks there are.
"""
