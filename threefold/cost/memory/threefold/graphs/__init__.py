"""CUDA graphs of our own engine: the memory that they hold."""
