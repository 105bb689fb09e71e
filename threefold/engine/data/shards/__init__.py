"""The token shard, the file format that training reads: opening, verifying and writing it."""
