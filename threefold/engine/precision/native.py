"""Products of narrow matrices by the device's own kernels, through torch's `scaled_mm`.

Hopper has FP8 in blocks of 128, by rows and with one scale. Blackwell's MXFP8 and NVFP4 are written after torch's
documentation and have not yet run on one.

Shapes: M rows, K columns, N rows of the other matrix.
"""

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.precision.emulated import Emulated
from threefold.engine.precision.formats import E4M3, Format
from threefold.engine.precision.quantize import Cast, Quantized, plain_scales
from threefold.engine.precision.recipes import Recipe
from threefold.engine.precision.swizzle import swizzled

_ALIGN = 16  # bytes that a row begins at a multiple of


class InBlocks(Emulated):
    """1x128 and 128x128 with powers of two, weights 128x128 with scales in fp32."""

    def along_rows(self, x_MK: Tensor, cast: Cast) -> Quantized:
        from threefold.engine.precision.blocks import quantize_blocks

        (value, scale), _ = quantize_blocks(_rows(x_MK), rows=True, columns=False, square=False)
        return Quantized(value, scale, None, _shape(x_MK), cast)

    def turned(self, x_MK: Tensor, cast: Cast) -> Quantized:
        from threefold.engine.precision.blocks import quantize_blocks

        _, (value, scale) = quantize_blocks(_rows(x_MK), rows=False, columns=True, square=_square(cast))
        return Quantized(value, scale, None, _shape(x_MK.T), cast)

    def both(self, x_MK: Tensor, cast: Cast, cast_t: Cast) -> tuple[Quantized, Quantized]:
        from threefold.engine.precision.blocks import quantize_blocks

        rows, columns = quantize_blocks(_rows(x_MK), rows=True, columns=True, square=_square(cast_t))
        return Quantized(*rows, None, _shape(x_MK), cast), Quantized(*columns, None, _shape(x_MK.T), cast_t)

    def weights(self, weight_MK: Tensor, cast: Cast) -> tuple[Quantized, Quantized]:
        from threefold.engine.precision.blocks import quantize_squares

        there, back = quantize_squares(_rows(weight_MK))
        return Quantized(*there, None, _shape(weight_MK), cast), Quantized(*back, None, _shape(weight_MK.T), cast)

    def multiply(self, a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
        square = _square(b_NK.cast)
        kind = F.ScalingType.BlockWise128x128 if square else F.ScalingType.BlockWise1x128
        scales_b = b_NK.scales.T if square else b_NK.scales
        out = F.scaled_mm(
            a_MK.values, b_NK.values.T, a_MK.scales, F.ScalingType.BlockWise1x128, scales_b, kind, output_dtype=dtype
        )
        return out if out.shape[1] == b_NK.shape[0] else out[:, : b_NK.shape[0]].contiguous()


class ByRows(InBlocks):
    """A scale a row, or one for the whole matrix; blocks where a recipe has both."""

    def along_rows(self, x_MK: Tensor, cast: Cast) -> Quantized:
        assert cast.format.dtype is not None
        if cast.block == (1, None):
            from threefold.engine.kernels.fp8.rowwise import quantize_rows

            made = quantize_rows(x_MK.contiguous(), None)
            return Quantized(made.value_RK, made.scale_CR.T, None, _shape(x_MK), cast)
        largest = torch.linalg.vector_norm(x_MK, float("inf")).to(torch.float32)
        scale = plain_scales(largest, cast.format).view(1, 1)
        values = (x_MK / scale).clamp_(-cast.format.largest, cast.format.largest).to(cast.format.dtype)
        return Quantized(values, scale, None, _shape(x_MK), cast)

    def turned(self, x_MK: Tensor, cast: Cast) -> Quantized:
        return super().turned(x_MK, cast) if _in_blocks(cast) else self.along_rows(x_MK.T.contiguous(), cast)

    def both(self, x_MK: Tensor, cast: Cast, cast_t: Cast) -> tuple[Quantized, Quantized]:
        return self.along_rows(x_MK, cast), self.turned(x_MK, cast_t)

    def weights(self, weight_MK: Tensor, cast: Cast) -> tuple[Quantized, Quantized]:
        return self.along_rows(weight_MK, cast), self.turned(weight_MK, cast)

    def multiply(self, a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
        if _in_blocks(a_MK.cast):
            return super().multiply(a_MK, b_NK, dtype)
        return torch._scaled_mm(
            a_MK.values,
            b_NK.values.T,
            scale_a=a_MK.scales,
            scale_b=b_NK.scales.T,
            out_dtype=dtype,
            use_fast_accum=False,
        )


def _in_blocks(cast: Cast) -> bool:
    return cast.block[1] is not None


def _square(cast: Cast) -> bool:
    return cast.block[0] != 1


class Micro(Emulated):
    """Blackwell: scales of short blocks beside the values, in the order that the tensor cores read them."""

    def multiply(self, a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
        nv = a_MK.cast.scale == "e4m3"
        kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise] if nv else [F.ScalingType.BlockWise1x32]
        orders = [F.SwizzleType.SWIZZLE_32_4_4, *([F.SwizzleType.NO_SWIZZLE] if nv else [])]
        a, b = (x.values.view(torch.float4_e2m1fn_x2) if nv else x.values for x in (a_MK, b_NK))
        return F.scaled_mm(
            a,
            b.T,
            _with_top(a_MK),
            kinds,
            _with_top(b_NK),
            kinds,
            swizzle_a=orders,
            swizzle_b=orders,
            output_dtype=dtype,
        )


def _with_top(x: Quantized) -> list[Tensor]:
    high = x.cast.block[0] or 1
    scales = x.scales if high == 1 else x.scales.view(torch.uint8).repeat_interleave(high, 0).view(x.scales.dtype)
    packed = swizzled(scales[: x.shape[0]])
    return [packed] if x.top is None else [packed, x.top.view(1)]


class Unmade(Emulated):
    """A rehearsal's: sizes of what the kernels of a GPU would make, and nothing beside them."""

    def along_rows(self, x_MK: Tensor, cast: Cast) -> Quantized:
        (M, K), (high, wide) = x_MK.shape, cast.block
        whole = 1 if cast.format.dtype is None else wide or 1
        width = -(-K // whole) * whole
        values = x_MK.new_empty(M, width if cast.format.dtype else -(-K // 2), dtype=cast.format.dtype or torch.uint8)
        scales = x_MK.new_empty(-(-M // (high or M)), -(-K // (wide or K)), dtype=torch.float32)
        top = x_MK.new_empty((), dtype=torch.float32) if cast.scale == "e4m3" else None
        return Quantized(values, scales, top, _shape(x_MK), cast)

    def turned(self, x_MK: Tensor, cast: Cast) -> Quantized:
        return self.along_rows(x_MK.T, cast)

    def multiply(self, a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
        return a_MK.values.new_empty(a_MK.shape[0], b_NK.shape[0], dtype=dtype)


def _rows(x_MK: Tensor) -> Tensor:
    return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()


def _shape(x_MK: Tensor) -> tuple[int, int]:
    return x_MK.shape[0], x_MK.shape[1]


def native(recipe: Recipe, major: int) -> Emulated | None:
    """What a device of this compute capability has for the recipe."""
    in_blocks = find_spec("triton") is not None and hasattr(F, "scaled_mm") and major == 9
    if recipe.name == "fp8-blockwise" and in_blocks:
        return InBlocks()
    if (recipe.name == "fp8-rowwise" and in_blocks) or (recipe.name == "fp8-cs" and major in (9, 10)):
        return ByRows()
    if major == 10 and recipe.name in ("mxfp8", "nvfp4"):
        return Micro()
    return None


@cache
def capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def aligned(sizes: tuple[int, ...], form: Format = E4M3) -> bool:
    """Whether kernels take matrices of these sizes; others are emulated."""
    step = _ALIGN if form.dtype is not None else 2 * _ALIGN
    return all(size and size % step == 0 for size in sizes)
