"""Judgment: a plan in, findings out, each with a computed fix. One function a rule."""
