"""Readers of trace files: PyTorch's profiler (Kineto, Chrome JSON), Nsight Systems (SQLite), and our run folders."""
