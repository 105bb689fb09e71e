"""Causal attention by FlashAttention-4 (CuTe), an optional package for Hopper and Blackwell in bf16 and fp16.

`backend.py` chooses it, and `tune/attention_kernels.py` times it.

Shapes: B batch, H query heads, G key/value heads, S sequence, D head dim.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

MEASURED_RELEASE = "4.0.0b36"  # the one that trained steps on an H200 (benchmarks/results/step-fa4-h200.json)


@cache
def has_flash_attention_4(device: torch.device) -> bool:
    """Whether the package is installed and imports. It depends on others, and a wrong release of one breaks it."""
    if device.type != "cuda" or _major(device) not in (9, 10):
        return False
    try:
        from flash_attn.cute import flash_attn_func  # type: ignore # noqa: F401
    except Exception:
        return False
    return True


@cache
def has_measured_release(device: torch.device) -> bool:
    """Whether this is the release and the kind of GPU of the speeds in `kernel_speeds.MEASURED`. Others may be slower
    or fail: `calibrate` measures them first."""
    return installed_release() == MEASURED_RELEASE and has_flash_attention_4(device) and _major(device) == 9


def installed_release() -> str | None:
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return None


def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def flash_attention_4(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, scale: float) -> Tensor:
    """`backend.attend` for whole sequences without window and sinks.

    The kernel's layout is (B, S, H, D); the transposes here are views and copy nothing.
    """
    from flash_attn.cute import flash_attn_func

    transposed = (x.transpose(1, 2) for x in (q_BHSD, k_BGSD, v_BGSD))
    out = flash_attn_func(*transposed, softmax_scale=scale, causal=True)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
