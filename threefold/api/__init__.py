"""The library's functions: what `import threefold` offers, and what the commands call."""
