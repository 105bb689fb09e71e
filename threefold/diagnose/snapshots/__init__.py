"""Memory snapshots of `torch.cuda.memory`: read without running them, replayed to the peak, compared, and written."""
