"""Routed and shared experts: router, expert kernels, the layer that joins them, and what keeps them balanced."""
