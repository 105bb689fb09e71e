"""One rank on a real GPU with collectives that do nothing: measured peak memory and compute time."""
