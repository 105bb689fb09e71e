"""Dequantizes published weights to bf16: DeepSeek's block-scaled fp8 and GPT-OSS's MXFP4. `read_hf` calls it.

Shapes: M rows, N columns, m x n blocks; ... stands for any leading dims.
"""

import torch
from torch import Tensor

# The 16 values of fp4 e2m1: OCP Microscaling Formats specification 1.0, section 5.3.3.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127
MXFP4_BLOCK_BYTES = 16  # 32 values that share a scale


def dequantize_fp8_blocks(weight_MN: Tensor, scale_mn: Tensor, block: tuple[int, int]) -> Tensor:
    """`scale_mn` (`weight_scale_inv` in the file) has one factor for each block; blocks at the edges may be smaller."""
    rows, columns = weight_MN.shape
    factor = scale_mn.repeat_interleave(block[0], dim=0)[:rows].repeat_interleave(block[1], dim=1)[:, :columns]
    return (weight_MN.to(torch.float32) * factor).to(torch.bfloat16)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """(..., n, 16) bytes of two values each, the low four bits first, and (..., n) exponents -> (..., n * 32)."""
    table = torch.tensor(_FP4, dtype=torch.bfloat16, device=blocks.device)
    values = torch.stack([table[(blocks & 0x0F).long()], table[(blocks >> 4).long()]], dim=-1).flatten(-2)
    exponent = scales.to(torch.int32) - _E8M0_BIAS
    return torch.ldexp(values.to(torch.float32), exponent[..., None]).to(torch.bfloat16).flatten(-2)
