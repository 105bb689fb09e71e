"""What the Gluon kernels of the experts share: descriptors of blocks, and the order of tiles."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon  # type: ignore
from triton.experimental.gluon import language as gl  # type: ignore

from threefold.engine.kernels.fast_launch import tensor_blocks

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def gluon_blocks(base: Tensor, *block: int) -> Any:
    """A tensor that a kernel loads or stores by TMA in blocks of this shape."""
    return tensor_blocks(base, list(block), _shared_layout(base.dtype, block))


@cache
def _shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])


@gluon.jit
def tile_coordinates(tile, num_m, num_n, GROUP: gl.constexpr):
    """Tile number -> (tile of rows, tile of columns). Neighboring tiles share rows and weights, which stay in L2."""
    width = GROUP * num_n
    first = (tile // width) * GROUP
    height = gl.minimum(num_m - first, GROUP)
    inside = tile % width
    return first + inside % height, inside // height
