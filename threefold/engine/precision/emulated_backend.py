"""The backend that emulates low-precision GEMMs exactly, on any device: quantize, dequantize, multiply in fp32.

It also defines the methods that all backends have; `choose_backend` picks one.

Shapes: M rows, K columns, N rows of the other matrix.
"""

import torch
from torch import Tensor

from threefold.engine.precision.quantize import Quantized, QuantSpec, quantize
from threefold.engine.sum_dtype import fp32_or_wider


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
