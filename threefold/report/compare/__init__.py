"""Comparisons and hunts for regressions, as text and as a picture."""
