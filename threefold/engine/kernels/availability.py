"""Which of the optional kernels this process can launch: ours in Triton, and those of the package quack-kernels.

Experts, loss and optimizer ask here whether to launch a kernel or run plain torch; the elementwise parts ask
`fusion_switch.py`, which asks here. Nothing in this module imports triton or quack before it knows that they are
installed.
"""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch


@cache
def has_triton_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run: on Hopper and later, or anywhere in Triton's interpreter."""
    if find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


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
