"""torch's attention kernels by name; its flash kernels as operators that give and take log-sum-exps.

Shapes: ... any leading dims, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
CUDA = torch.ops.aten._flash_attention_forward
CUDA_BACKWARD = torch.ops.aten._flash_attention_backward
DIM_STEP = 8
_MAX_DIM = 256


def cuda_takes(q: Tensor) -> bool:
    """By head dim and dtype."""
    fits = q.shape[-1] <= _MAX_DIM and q.shape[-1] % DIM_STEP == 0
    return fits and q.dtype in (torch.bfloat16, torch.float16)


def widen(width: int, x: Tensor) -> Tensor:
    """They want values as wide as keys; zeros add nothing (latent attention has narrower values)."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x
