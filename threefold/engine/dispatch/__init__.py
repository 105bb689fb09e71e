"""Tokens to experts and back: one transport a file, one protocol."""
