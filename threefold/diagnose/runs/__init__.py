"""Folders of runs of the threefold engine: whether they are sound."""
