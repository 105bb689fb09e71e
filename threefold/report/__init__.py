"""Telling: terminal text. Computes nothing."""
