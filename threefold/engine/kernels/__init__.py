"""Fast kernels, each with a slow reference beside it. Only the files that hold Triton code import triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs
