"""Saved tensors and the order of gradients: recompute, offload, fused accumulation, delayed wgrad."""
