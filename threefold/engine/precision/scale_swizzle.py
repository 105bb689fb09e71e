"""Reorders scales as Blackwell's tensor cores read them: tiles of 128 rows x 4 columns. `scaled_mm_backends` calls it.

Inside a tile the scale of row r and column c is number (r % 32) * 16 + (r // 32) * 4 + c: NVIDIA cuBLAS documentation,
"1D block scaling factors layout".

Shapes: M rows, k columns of scales.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS, _COLUMNS, _GROUP = 128, 4, 32


def swizzle_scales(scales_Mk: Tensor) -> Tensor:
    """The scales in that order, flat, padded to whole tiles."""
    dtype, (rows, columns) = scales_Mk.dtype, scales_Mk.shape
    whole = F.pad(scales_Mk.view(torch.uint8), (0, -columns % _COLUMNS, 0, -rows % _ROWS))
    tiles = whole.view(-(-rows // _ROWS), _ROWS // _GROUP, _GROUP, -(-columns // _COLUMNS), _COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(dtype)
