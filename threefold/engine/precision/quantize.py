"""Quantization of a matrix to a low-precision format with a scale for each block: exact, in plain torch, on any device.

Blocks lie along the columns, the dim that a GEMM sums over. The number that is meant is the stored value times its
scale. The last block of a row or column may be short. The emulated backend uses this module, and tests compare the
kernels with it.

Example: in 1x128 blocks, a (300, 512) matrix has values (300, 512) and scales (300, 4).

Shapes: M rows, K columns, m x k blocks.
"""

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.kernels.fp8.quantized_tensors import SMALLEST_SCALE
from threefold.engine.precision.float_formats import E4M3, FloatFormat, decode, encode, next_power_of_two

ScaleFormat = Literal["fp32", "power", "e8m0", "e4m3"]
BlockShape = tuple[int | None, int | None]
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_SMALLEST_E4M3 = 2.0 ** (E4M3.min_exponent - E4M3.mantissa_bits)
HADAMARD_SIZE = 16  # columns of a block: arXiv 2509.25149, section 4.2
_SEED = 0  # of the random signs: one vector for all GEMMs of a run, so that both sides of each have the same


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """How a matrix is quantized.

    Scales are fp32 numbers (`fp32`), powers of two stored in fp32 (`power`) or in a byte (`e8m0`), or e4m3 numbers
    under one fp32 scale for the whole matrix (`e4m3`).
    """

    format: FloatFormat
    block: BlockShape  # rows x columns that share a scale; None for all of them
    scale: ScaleFormat = "fp32"
    stochastic: bool = False  # rounding at random, right on average
    hadamard: bool = False  # transformed by a random Hadamard matrix first, block by block


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized matrix. Its tensors may be larger than `shape`: kernels want whole blocks, padded by zeros."""

    values: Tensor
    scales: Tensor  # (m, k)
    global_scale: Tensor | None  # one scale for the whole matrix, on top of `scales`
    shape: tuple[int, int]
    spec: QuantSpec

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that values and scales represent."""
        x_MK = decode(self.values[: self.shape[0]], self.spec.format, self.shape[1])
        return (x_MK * _expand_scales(_total_scales(self.scales, self.global_scale), self.shape, self.spec.block)).to(
            dtype
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors to save; `with_tensors` rebuilds the matrix from them."""
        return (
            (self.values, self.scales) if self.global_scale is None else (self.values, self.scales, self.global_scale)
        )

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> "Quantized":
        global_scale = tensors[2] if self.global_scale is not None else None
        return Quantized(tensors[0], tensors[1], global_scale, self.shape, self.spec)


def quantize(x_MK: Tensor, spec: QuantSpec) -> Quantized:
    """Quantize a matrix along its columns."""
    x_MK = x_MK.to(torch.float32)
    if spec.hadamard:
        x_MK = hadamard_transform(x_MK)
    shape = (x_MK.shape[0], x_MK.shape[1])
    scales, global_scale = _block_scales(_block_amax(x_MK, spec.block), spec)
    x_MK = x_MK / _expand_scales(_total_scales(scales, global_scale), shape, spec.block)
    return Quantized(encode(x_MK, spec.format, spec.stochastic), scales, global_scale, shape, spec)


def _total_scales(scales: Tensor, global_scale: Tensor | None) -> Tensor:
    return scales.to(torch.float32) if global_scale is None else scales.to(torch.float32) * global_scale


def fp32_scales(amax: Tensor, float_format: FloatFormat) -> Tensor:
    """The fp32 scales by which each amax becomes the format's largest number; SMALLEST_SCALE at least, 1 for zeros."""
    return _exact_scales(amax, float_format).clamp(min=SMALLEST_SCALE).where(amax != 0, 1.0)


def _exact_scales(amax: Tensor, float_format: FloatFormat) -> Tensor:
    # The divisor is a tensor: CUDA multiplies by the inverse of a Python number, which rounds otherwise.
    return amax / torch.full_like(amax, float_format.max_value)


def _block_scales(amax_mk: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor | None]:
    """Scales by which the amax of a block becomes the format's largest number, or up to half of it; 1 for zeros."""
    if spec.scale == "fp32":
        return fp32_scales(amax_mk, spec.format), None
    exact = _exact_scales(amax_mk, spec.format)
    if spec.scale in ("power", "e8m0"):
        scales = next_power_of_two(exact.clamp(min=_SMALLEST_NORMAL)).where(amax_mk != 0, 1.0)
        return scales.to(torch.float8_e8m0fnu) if spec.scale == "e8m0" else scales, None
    # arXiv 2509.25149, appendix C: the largest block scale becomes the largest number of e4m3. A scale that would
    # round to zero is the smallest number of e4m3 instead.
    highest = amax_mk.amax() if amax_mk.numel() else amax_mk.new_zeros(())
    global_scale = _one_for_zero(highest / (spec.format.max_value * E4M3.max_value))
    scales = E4M3.round_nearest(exact / global_scale).clamp(min=_SMALLEST_E4M3).where(exact != 0, 1.0)
    return scales.to(torch.float8_e4m3fn), global_scale


def _one_for_zero(x: Tensor) -> Tensor:
    return x.where(x != 0, 1.0)


def _block_amax(x_MK: Tensor, block: BlockShape) -> Tensor:
    (m, block_rows), (k, block_columns) = (
        count_blocks(size, length) for size, length in zip(x_MK.shape, block, strict=True)
    )
    if not x_MK.numel():
        return x_MK.new_zeros(m, k)
    padded = F.pad(x_MK, (0, k * block_columns - x_MK.shape[1], 0, m * block_rows - x_MK.shape[0]))
    return padded.view(m, block_rows, k, block_columns).abs().amax(dim=(1, 3))


def count_blocks(size: int, length: int | None) -> tuple[int, int]:
    """The number of blocks, and their length."""
    return (1, size) if length is None else (-(-size // length), length)


def _expand_scales(scales: Tensor, shape: tuple[int, int], block: BlockShape) -> Tensor:
    """The scale of each element. A dim with one scale only is left to broadcasting."""
    for dim, (size, length) in enumerate(zip(shape, block, strict=True)):
        if length is not None:
            scales = scales if length == 1 else scales.repeat_interleave(length, dim=dim)
            scales = scales.narrow(dim, 0, size)
    return scales


def hadamard_transform(x_MK: Tensor) -> Tensor:
    """Multiply each block of columns by one orthogonal matrix, which spreads an outlier over its block. In a GEMM of
    two transformed matrices it cancels. The columns are padded with zeros to whole blocks."""
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
