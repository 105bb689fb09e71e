"""Measurement: a trace file becomes spans, and spans become walls. `profile/analyse.py` is the way in."""
