"""Mamba-2: the mixer of a layer, its scan in chunks, and the optional kernels of `mamba-ssm`."""
