"""Training data: token shards on disk, packing, the mixture of sources, and batches.

docs/reference/data-format.md describes formats and order.
"""
