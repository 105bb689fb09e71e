"""Kernels of the experts for Hopper GPUs, in Gluon: some warps load, others multiply."""
