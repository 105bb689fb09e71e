"""Placement as arithmetic: degrees, the two grids and their fold, stages, links. No processes, no torch."""
