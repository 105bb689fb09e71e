"""Stored documents: the token shard, Megatron's two files, and parts of them."""
