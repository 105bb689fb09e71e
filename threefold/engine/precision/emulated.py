"""Products of narrow matrices by exact emulation, on any device: rounded, made wide again, multiplied in fp32.

Shapes: M rows, K columns, N rows of the other matrix.
"""

import torch
from torch import Tensor

from threefold.engine.norm import wide
from threefold.engine.precision.quantize import Cast, Quantized, quantize


class Emulated:
    def along_rows(self, x_MK: Tensor, cast: Cast) -> Quantized:
        """For a sum over its columns."""
        return quantize(x_MK, cast)

    def turned(self, x_MK: Tensor, cast: Cast) -> Quantized:
        """Its transpose, for a sum over its rows."""
        return quantize(x_MK.T, cast)

    def both(self, x_MK: Tensor, cast: Cast, cast_t: Cast) -> tuple[Quantized, Quantized]:
        return self.along_rows(x_MK, cast), self.turned(x_MK, cast_t)

    def weights(self, weight_MK: Tensor, cast: Cast) -> tuple[Quantized, Quantized]:
        """A weight for the product forward, and turned for the gradient of its input."""
        return self.along_rows(weight_MK, cast), self.turned(weight_MK, cast)

    def multiply(self, a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
        """a b^T, summed in fp32 at least."""
        narrow = dtype if a_MK.values.is_cuda and _exact(a_MK.cast, dtype) and _exact(b_NK.cast, dtype) else wide(dtype)
        return (a_MK.wide(narrow) @ b_NK.wide(narrow).T).to(dtype)


def _exact(cast: Cast, dtype: torch.dtype) -> bool:
    """Whether numbers of it are numbers of `dtype`: then tensor cores multiply them without an error."""
    return dtype == torch.bfloat16 and cast.scale in ("power", "e8m0")
