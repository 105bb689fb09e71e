"""Whose way the engine goes where devices differ: that of its tensors, or of the GPU that a rehearsal's stand for.

A rehearsal's tensors have no memory, and are on no GPU, because the backward there needs a driver.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# No context variable: a recompute asks from the thread of the backward.
_stand_for: list[str] = []


def way(device: torch.device) -> str:
    """The type of the device whose kernels, buffers and chunks to use."""
    return _stand_for[-1] if _stand_for else device.type


def stood_for() -> bool:
    """Whether the tensors stand for those of a GPU: no kernel can be tried out, and no host lies apart."""
    return _stand_for[-1:] == ["cuda"]


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    _stand_for.append(kind)
    try:
        yield
    finally:
        _stand_for.remove(kind)
