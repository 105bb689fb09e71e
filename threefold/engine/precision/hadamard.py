"""The random Hadamard transform of NVFP4: it spreads an outlier over its block.

In a GEMM of two transformed matrices it cancels. `quantize` applies it where a spec has `hadamard` set.

Shapes: M rows, K columns.
"""

from functools import cache
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

HADAMARD_SIZE = 16  # columns of a block: arXiv 2509.25149, section 4.2
_SEED = 0  # of the random signs: one vector for all GEMMs of a run, so that both sides of each have the same


def hadamard_transform(x_MK: Tensor) -> Tensor:
    """Multiply each block of columns by one orthogonal matrix. The columns are padded with zeros to whole blocks."""
    rows, columns = x_MK.shape
    whole = F.pad(x_MK, (0, -columns % HADAMARD_SIZE)).reshape(rows, -(-columns // HADAMARD_SIZE), HADAMARD_SIZE)
    return (whole @ torch.tensor(hadamard_matrix(), dtype=x_MK.dtype, device=x_MK.device)).flatten(1)


@cache
def hadamard_matrix() -> list[list[float]]:
    """The matrix with random signs: orthogonal, every element +-1/4. Lists, so that no device or dry run owns it."""
    signs = Random(_SEED).choices((-1.0, 1.0), k=HADAMARD_SIZE)
    return [
        [sign * HADAMARD_SIZE**-0.5 * (-1) ** (i & j).bit_count() for j in range(HADAMARD_SIZE)]
        for i, sign in enumerate(signs)
    ]
