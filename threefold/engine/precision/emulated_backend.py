"""The backend that emulates low-precision GEMMs exactly, on any device: quantize, dequantize, multiply in fp32.

It also defines the methods that all backends have; `choose_backend` picks one.

Shapes: M rows, K columns, N rows of the other matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.engine.precision.quantize import Quantized, QuantSpec, quantize
from threefold.engine.sum_dtype import fp32_or_wider


@dataclass(frozen=True)
class QuantizedWeights:
    """The weights of layers that share an input, for the forward GEMMs, and transposed for the input gradient.

    Where a backend joins them, there is one transpose: those of all weights side by side.
    """

    forward: tuple[Quantized, ...]
    transposed: tuple[Quantized, ...]

    @property
    def is_joined(self) -> bool:
        return len(self.transposed) < len(self.forward)


class EmulatedBackend:
    """Quantization and GEMM of a recipe in plain torch."""

    def quantize_rows(self, x_MK: Tensor, spec: QuantSpec) -> Quantized:
        """Quantize a matrix for a GEMM that sums over its columns."""
        return quantize(x_MK, spec)

    def quantize_transposed(self, x_MK: Tensor, spec: QuantSpec) -> Quantized:
        """Quantize the transpose of a matrix, for a GEMM that sums over its rows."""
        return quantize(x_MK.T, spec)

    def quantize_both(self, x_MK: Tensor, spec: QuantSpec, spec_t: QuantSpec) -> tuple[Quantized, Quantized]:
        return self.quantize_rows(x_MK, spec), self.quantize_transposed(x_MK, spec_t)

    def quantize_weight(self, weight_MK: Tensor, spec: QuantSpec) -> tuple[Quantized, Quantized]:
        """Quantize a weight for the forward GEMM, and its transpose for the input gradient."""
        return self.quantize_rows(weight_MK, spec), self.quantize_transposed(weight_MK, spec)

    def quantize_weights(self, weights: Sequence[Tensor], spec: QuantSpec) -> QuantizedWeights:
        """Quantize the weights of layers that share an input."""
        forward, transposed = zip(*(self.quantize_weight(weight, spec) for weight in weights), strict=True)
        return QuantizedWeights(forward, transposed)

    def quantize_joined(
        self, parts: Sequence[Tensor], spec: QuantSpec | None, spec_t: QuantSpec | None
    ) -> tuple[Quantized | None, Quantized | None]:
        """Quantize matrices side by side, by rows and transposed, each where its spec is given."""
        joined_MK = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
        if spec is not None and spec_t is not None:
            return self.quantize_both(joined_MK, spec, spec_t)
        rows = None if spec is None else self.quantize_rows(joined_MK, spec)
        return rows, None if spec_t is None else self.quantize_transposed(joined_MK, spec_t)

    def matmul(self, a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
        """a b^T, summed in fp32 or wider."""
        compute_dtype = (
            dtype
            if a_MK.values.is_cuda and _is_exact_in(a_MK.spec, dtype) and _is_exact_in(b_NK.spec, dtype)
            else fp32_or_wider(dtype)
        )
        return (a_MK.dequantize(compute_dtype) @ b_NK.dequantize(compute_dtype).T).to(dtype)


def _is_exact_in(spec: QuantSpec, dtype: torch.dtype) -> bool:
    """Whether `dtype` represents the dequantized numbers exactly, so that tensor cores multiply them without error."""
    return dtype == torch.bfloat16 and spec.scale in ("power", "e8m0")
