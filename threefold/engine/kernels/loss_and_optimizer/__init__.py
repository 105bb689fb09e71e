"""Fused kernels of the loss and of the optimizer step: cross entropy, sum of squares, AdamW."""
