"""Whether the kernels around the experts run (norms, rotary embedding, router, activation, permutation): one answer for
all of them. Their torch forms stay, for other devices and as their reference.

THREEFOLD_FUSED=0 in the environment, or `in_plain_torch`, switches them off.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from threefold.engine.kernels.choose import works
from threefold.engine.ways import stood_for

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_H200_MULTIPROCESSORS = 132

# No context variable: a recompute asks from the thread of the backward.
_off: list[bool] = [True] if os.environ.get("THREEFOLD_FUSED") == "0" else []


def fused(*tensors: Tensor) -> bool:
    """Whether they take these tensors."""
    return all(x.dtype in _DTYPES and x.numel() > 0 for x in tensors) and fused_on(tensors[0].device)


def fused_on(device: torch.device) -> bool:
    """Where tensors stand for those of a GPU, the kernels are taken to run there, and only their results are made."""
    return not _off and (stood_for() or works(device))


@contextmanager
def in_plain_torch() -> Iterator[None]:
    _off.append(True)
    try:
        yield
    finally:
        _off.pop()


@cache
def num_programs(device: torch.device, per_sm: int) -> int:
    """Of a kernel whose programs go on from row to row, so that each sums what it saw."""
    if device.type != "cuda":
        return _H200_MULTIPROCESSORS * per_sm if stood_for() else 4
    return torch.cuda.get_device_properties(device).multi_processor_count * per_sm
