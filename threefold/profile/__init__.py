"""Measurement: a trace file becomes spans, and spans become walls. `profile/analyze.py` is the way in."""
