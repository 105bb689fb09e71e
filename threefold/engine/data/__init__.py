"""Training data: token shards on disk, packing, the mixture of sources, and batches. See docs/data.md."""
