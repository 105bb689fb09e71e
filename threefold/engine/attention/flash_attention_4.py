"""Causal attention by FlashAttention-4 (CuTe), an optional package for Hopper and Blackwell in bf16 and fp16.

`backend.py` chooses it, and `tune/attention_kernels.py` times it.

Shapes: B batch, H query heads, G key/value heads, S sequence, D head dim.
"""

import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

MEASURED_RELEASE = "4.0.0b36"  # the one that trained steps on an H200 (benchmarks/results/step-fa4-h200.json)


@cache
def has_flash_attention_4(device: torch.device) -> bool:
    """Whether the package runs on this GPU. A warning says so where it is installed and does not import."""
    if device.type != "cuda" or _major(device) not in (9, 10):
        return False
    problem = import_problem()
    if problem is not None and installed_release() is not None:
        fix = "pip install 'threefold[fa4]' has releases that fit, and removing the package ends this warning"
        warnings.warn(f"flash-attn-4 is installed but not used: it does not import ({problem}); {fix}", stacklevel=2)
    return problem is None


def import_problem() -> str | None:
    """Why the package does not import. It depends on others, and a wrong release of one breaks it."""
    try:
        from flash_attn.cute import flash_attn_func  # type: ignore # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


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
