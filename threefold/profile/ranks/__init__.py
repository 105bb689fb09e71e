"""Traces of several ranks together: matched collectives, clocks, fingerprints, opportunities, and what stays open."""
