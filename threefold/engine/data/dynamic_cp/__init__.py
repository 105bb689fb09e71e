"""Batches for dynamic context parallelism: which ranks work on which documents of a step, and in which round."""
