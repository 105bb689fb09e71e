"""The experts in FP8 (e4m3): kernels that quantise where values are made, and products over what they made.

`experts.fp8_experts` is the way in. Only the files that hold Triton code import triton.
"""
