"""Fused kernels around the GEMMs: norms, rotary embedding, router, SwiGLU, permutation, loss, optimizer.

A file `x.py` holds the autograd Function and allocates; `x_triton.py` holds the Triton kernels and their launches.
"""
