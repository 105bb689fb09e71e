"""Prediction: a plan in, bytes and seconds out, by named term. Pure functions; no torch."""
