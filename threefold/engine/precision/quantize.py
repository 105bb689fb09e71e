"""A matrix in a narrow format with a scale for each block of it: exact, in plain torch, on any device.

Blocks lie along the columns, which are what a product sums over. Scales are those that give numbers back: what is
stored times its scale. The last block of a row or a column may be short.

Shapes: M rows, K columns, m x k blocks.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.kernels.fp8.format import SMALLEST_SCALE
from threefold.engine.precision.formats import E4M3, Format, encode, load, power_above
from threefold.engine.precision.rotate import rotate

Scale = Literal["fp32", "power", "e8m0", "e4m3"]
Block = tuple[int | None, int | None]
_TINY = torch.finfo(torch.float32).tiny
_SMALLEST = 2.0 ** (E4M3.min_exponent - E4M3.mantissa_bits)


@dataclass(frozen=True, slots=True)
class Cast:
    """How a matrix is rounded; `block` is rows x columns that share a scale, None for all of them.

    Scales are fp32 numbers, powers of two kept as such (`power`) or in a byte (`e8m0`), or e4m3 numbers under one fp32
    number for the whole matrix.
    """

    format: Format
    block: Block
    scale: Scale = "fp32"
    stochastic: bool = False
    rotated: bool = False  # by a random Hadamard matrix, block by block


@dataclass(frozen=True, slots=True)
class Quantized:
    """`values` and `scales` may be wider than `shape` says: kernels want whole blocks, with zeros behind."""

    values: Tensor
    scales: Tensor  # (m, k)
    top: Tensor | None  # scale of the whole matrix
    shape: tuple[int, int]
    cast: Cast

    def wide(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers it stands for."""
        x_MK = load(self.values[: self.shape[0]], self.cast.format, self.shape[1])
        return (x_MK * _spread(_whole(self.scales, self.top), self.shape, self.cast.block)).to(dtype)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What must be kept to have it again by `like`."""
        return (self.values, self.scales) if self.top is None else (self.values, self.scales, self.top)

    def like(self, tensors: tuple[Tensor, ...]) -> "Quantized":
        top = tensors[2] if self.top is not None else None
        return Quantized(tensors[0], tensors[1], top, self.shape, self.cast)


def quantize(x_MK: Tensor, cast: Cast) -> Quantized:
    x_MK = x_MK.to(torch.float32)
    if cast.rotated:
        x_MK = rotate(x_MK)
    shape = (x_MK.shape[0], x_MK.shape[1])
    scales, top = _scales(_largest(x_MK, cast.block), cast)
    x_MK = x_MK / _spread(_whole(scales, top), shape, cast.block)
    return Quantized(encode(x_MK, cast.format, cast.stochastic), scales, top, shape, cast)


def _whole(scales: Tensor, top: Tensor | None) -> Tensor:
    return scales.to(torch.float32) if top is None else scales.to(torch.float32) * top


def plain_scales(largest: Tensor, form: Format) -> Tensor:
    """In fp32, so that these become the format's largest; 1 for zeros."""
    return _needed(largest, form).clamp(min=SMALLEST_SCALE).where(largest != 0, 1.0)


def _needed(largest: Tensor, form: Format) -> Tensor:
    # By a tensor: on CUDA torch multiplies by the inverse of a plain number, which is not the same.
    return largest / torch.full_like(largest, form.largest)


def _scales(largest_mk: Tensor, cast: Cast) -> tuple[Tensor, Tensor | None]:
    """So that the largest number of a block becomes the format's largest, or up to half of it; 1 for zeros."""
    if cast.scale == "fp32":
        return plain_scales(largest_mk, cast.format), None
    needed = _needed(largest_mk, cast.format)
    if cast.scale in ("power", "e8m0"):
        scales = power_above(needed.clamp(min=_TINY)).where(largest_mk != 0, 1.0)
        return scales.to(torch.float8_e8m0fnu) if cast.scale == "e8m0" else scales, None
    # arXiv 2509.25149, appendix C: the largest block's scale becomes the largest number of e4m3. One that would become
    # zero is the smallest number instead.
    highest = largest_mk.amax() if largest_mk.numel() else largest_mk.new_zeros(())
    top = _or_one(highest / (cast.format.largest * E4M3.largest))
    scales = E4M3.nearest(needed / top).clamp(min=_SMALLEST).where(needed != 0, 1.0)
    return scales.to(torch.float8_e4m3fn), top


def _or_one(x: Tensor) -> Tensor:
    return x.where(x != 0, 1.0)


def _largest(x_MK: Tensor, block: Block) -> Tensor:
    (m, high), (k, wide) = (blocks(size, length) for size, length in zip(x_MK.shape, block, strict=True))
    if not x_MK.numel():
        return x_MK.new_zeros(m, k)
    padded = F.pad(x_MK, (0, k * wide - x_MK.shape[1], 0, m * high - x_MK.shape[0]))
    return padded.view(m, high, k, wide).abs().amax(dim=(1, 3))


def blocks(size: int, length: int | None) -> tuple[int, int]:
    """How many, and how long."""
    return (1, size) if length is None else (-(-size // length), length)


def _spread(scales: Tensor, shape: tuple[int, int], block: Block) -> Tensor:
    """Of each element; where a dim has one scale only, as that."""
    for dim, (size, length) in enumerate(zip(shape, block, strict=True)):
        if length is not None:
            scales = scales if length == 1 else scales.repeat_interleave(length, dim=dim)
            scales = scales.narrow(dim, 0, size)
    return scales
