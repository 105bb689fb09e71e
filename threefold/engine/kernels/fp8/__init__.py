"""Routed experts in FP8 (e4m3): kernels that quantize where values are produced, and GEMMs over the quantized values.

`fused_experts.fp8_experts` is the entry point; `precision/low_precision_experts.py` calls it. Only the files that hold
Triton code import triton.
"""
