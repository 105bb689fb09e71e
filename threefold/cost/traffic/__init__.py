"""The collectives of a training step: axis, operation, bytes that a rank sends, count and link."""
