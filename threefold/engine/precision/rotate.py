"""The random Hadamard transform: it spreads an outlier over its block, and cancels where two rotated matrices meet.

Shapes: M rows, K columns.
"""

from functools import cache
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE = 16  # of a block: arXiv 2509.25149, section 4.2
_SEED = 0  # of the signs: one vector for all products of a run, so that both sides of each have the same


def rotate(x_MK: Tensor) -> Tensor:
    """Each block of columns times one orthogonal matrix; to whole blocks, as if zeros were behind the last column."""
    rows, columns = x_MK.shape
    whole = F.pad(x_MK, (0, -columns % SIZE)).reshape(rows, -(-columns // SIZE), SIZE)
    return (whole @ torch.tensor(hadamard(), dtype=x_MK.dtype, device=x_MK.device)).flatten(1)


@cache
def hadamard() -> list[list[float]]:
    """With random signs: orthogonal, every element +-1/4. No tensor, so that it belongs to no device or rehearsal."""
    signs = Random(_SEED).choices((-1.0, 1.0), k=SIZE)
    return [[sign * SIZE**-0.5 * (-1) ** (i & j).bit_count() for j in range(SIZE)] for i, sign in enumerate(signs)]
