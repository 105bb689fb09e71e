"""Parts of a step recorded once as CUDA graphs and replayed: the host launches one graph in place of many kernels."""
