"""CUDA graphs: parts of a step are recorded once and replayed, so the host launches one graph, not many kernels."""
