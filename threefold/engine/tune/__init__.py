"""Measurements on this machine for `threefold env`: the fastest attention and expert kernels, and which kernels run."""
