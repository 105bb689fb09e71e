"""Data: token shards, packing, mixing, one global order of samples, batches. See docs/data.md."""
