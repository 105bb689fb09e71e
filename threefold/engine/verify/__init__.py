"""Comparisons of a layout with one rank (the oracle), and the A/B measurement of expert-parallel overlap."""
