"""Measurements of kernels on this GPU, kept for later runs, and probes of what runs here."""
