"""One small file a family, assembled from a ModelSpec. They know nothing of parallelism."""
