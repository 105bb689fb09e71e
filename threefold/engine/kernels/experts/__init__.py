"""Fused kernels of the routed experts: grouped GEMMs, activation, sorting, and their slow references."""
