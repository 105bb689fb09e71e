"""The dtype in which sums, norms and softmaxes are taken."""

import torch


def fp32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """fp32 for tensors of at most 32 bits, fp64 for a model in fp64."""
    return torch.promote_types(dtype, torch.float32)
