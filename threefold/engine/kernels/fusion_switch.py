"""The switch between the fused kernels of `elementwise/` and their plain torch forms.

The modules that have both forms (norms, rotary embedding, router, MLP, permutation) all ask here. The plain torch forms
serve other devices, and they are the reference of the kernels' tests. THREEFOLD_FUSED=0 in the environment or
`without_fused_kernels` switches these off; experts, loss and optimizer keep theirs.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from threefold.engine.context import context, override
from threefold.engine.device import is_simulated
from threefold.engine.kernels.availability import has_triton_kernels

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_fused(*tensors: Tensor) -> bool:
    """Whether the fused kernels take tensors of these dtypes and sizes, and run on their device."""
    return all(x.dtype in _DTYPES and x.numel() > 0 for x in tensors) and runs_fused_on(tensors[0].device)


def runs_fused_on(device: torch.device) -> bool:
    """Whether fused kernels run on this device. A dry run takes the fused code paths and launches nothing: its tensors
    have no values, and only their sizes matter."""
    return context.fused_kernels and (is_simulated() or has_triton_kernels(device))


def without_fused_kernels() -> AbstractContextManager[None]:
    """Run the plain torch forms inside the `with` block."""
    return override("fused_kernels", False)
