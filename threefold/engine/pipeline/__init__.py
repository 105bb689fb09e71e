"""Pipelines: chunks of a model on the ranks of an axis, and the order in which microbatches pass through them."""
