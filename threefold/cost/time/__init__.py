"""Seconds of a training step, by named term."""
