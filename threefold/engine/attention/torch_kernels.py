"""torch's attention kernels: SDPA backends by the names of `kernel_speeds.py`, and flash operators with log-sum-exps.

`backend.py`, `attend_tiles.py` and `tune/attention_kernels.py` use them. The kernels know no sinks, which are added to
what they return.

Shapes: ... any leading dims, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FLASH_CUDA = torch.ops.aten._flash_attention_forward
FLASH_CUDA_BACKWARD = torch.ops.aten._flash_attention_backward
HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = 256  # of the flash kernels on GPUs


def flash_supports(q: Tensor) -> bool:
    """Whether the CUDA flash kernel takes this head dim and dtype."""
    fits = q.shape[-1] <= MAX_HEAD_DIM and q.shape[-1] % HEAD_DIM_MULTIPLE == 0
    return fits and q.dtype in (torch.bfloat16, torch.float16)


def pad_head_dim(width: int, x: Tensor) -> Tensor:
    """`x` padded with zeros to a head dim of `width`.

    The flash kernels want values as wide as keys, but MLA has narrower values. The zeros change nothing.
    """
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def with_dense_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each tensor, copied where the head dim is not the innermost in memory.

    torch's CPU kernels read rows of D neighboring numbers whatever the strides say. Halves of one dim each, which
    `rotate` concatenates for heads of two dims, come out with other strides.
    """
    return tuple(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors)


def add_sink(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with the sink added to the logits; `sinks` is broadcast against `lse`."""
    new_lse = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - new_lse).exp().unsqueeze(-1).to(out.dtype), new_lse


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sink from each query: minus the sink's probability times <dout, out>."""
    inner = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
    return -(sinks.to(lse.dtype) - lse).exp() * inner
