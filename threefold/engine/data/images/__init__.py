"""Images as training data: tar shards and JSONL, decoding in worker processes, patches, packing, and drawn scenes.

docs/reference/image-data.md describes formats and rules.
"""
