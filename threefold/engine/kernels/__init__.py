"""Triton kernels, each with a slow torch reference beside it. Only the files that hold Triton code import triton.

Folders, each of which may import those before it: `elementwise`, `experts` (bf16 and fp16), `fp8`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
