"""What autograd saves and when gradients are computed: recompute, offload, fused accumulation, delayed wgrad."""
