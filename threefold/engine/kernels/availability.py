"""Which of the optional kernels this process can launch: ours in Triton and Gluon, and those of quack-kernels.

Experts, loss and optimizer ask here whether to launch a kernel or run plain torch; the elementwise parts ask
`runs_fused`, which a test can switch off. Nothing in this module imports triton or quack before it knows that they are
installed.
"""

import os
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from threefold.engine.context import context, override
from threefold.engine.device import is_simulated

_GLUON_RELEASES = (
    (3, 6),
    (3, 8),
)  # the first release of triton that compiles our Gluon kernels, and the first that does not


@cache
def has_triton_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run: on Hopper and later, or anywhere in Triton's interpreter."""
    if find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def has_gluon_kernels(device: torch.device) -> bool:
    """Whether our Gluon kernels run: on Hopper only, with a release of Triton that they were written for. Triton's
    interpreter does not know Gluon."""
    if device.type != "cuda" or not has_triton_kernels(device) or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    release = tuple(int(part) for part in version("triton").split(".")[:2])
    known = _GLUON_RELEASES[0] <= release < _GLUON_RELEASES[1]
    return known and torch.cuda.get_device_capability(device)[0] == 9


@cache
def has_cute_kernels(device: torch.device) -> bool:
    """Whether quack-kernels is installed, runs on this GPU (Hopper only) and imports.

    The import is tried because the package depends on several others, and a wrong release of one of them breaks it.
    """
    if device.type != "cuda" or not quack_version() or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        import quack.epilogue.frontend
        import quack.gemm  # type: ignore # noqa: F401
    except Exception:
        return False
    return True


@cache
def quack_version() -> str | None:
    """The installed release of quack-kernels, or None."""
    try:
        return version("quack-kernels")
    except PackageNotFoundError:
        return None


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
