"""Fused kernels of token mixers: heads of MLA, the short convolution and the gated norm of the gated delta rule.

A file `x.py` holds the autograd Function and allocates; `x_triton.py` holds the Triton kernels and their launches.
"""
