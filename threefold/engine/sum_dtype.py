"""The dtype in which norms, softmaxes, losses and routers take their sums: fp32, or fp64 in a model in fp64."""

import torch


def fp32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """fp32 for tensors of at most 32 bits, fp64 for a model in fp64."""
    return torch.promote_types(dtype, torch.float32)
