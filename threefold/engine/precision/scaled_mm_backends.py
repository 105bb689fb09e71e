"""Backends that multiply quantized matrices with the device's kernels, through torch's `scaled_mm`.

Hopper has FP8 in blocks of 128, by rows and with one scale per matrix. Blackwell's MXFP8 and NVFP4 follow torch's
documentation and have not yet run on a GPU. `choose_backend` picks one of them; a dry run gets `SimulatedBackend`.

Shapes: M rows, K columns, N rows of the other matrix.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.precision.emulated_backend import EmulatedBackend, QuantizedWeights
from threefold.engine.precision.float_formats import E4M3, FloatFormat
from threefold.engine.precision.quantize import Quantized, QuantSpec, fp32_scales
from threefold.engine.precision.recipes import Recipe

_BLOCK = 128
_ALIGN = 16  # bytes: rows must begin at a multiple
_SCALE_DTYPES = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}


class BlockwiseBackend(EmulatedBackend):
    """FP8 in 1x128 and 128x128 blocks with power-of-two scales; weights in 128x128 blocks with fp32 scales."""

    def quantize_rows(self, x_MK: Tensor, spec: QuantSpec) -> Quantized:
        from threefold.engine.precision.quantize_for_cublas import quantize_blocks

        (value, scale), _ = quantize_blocks(_contiguous_rows(x_MK), rows=True, columns=False, square=False)
        return Quantized(value, scale, None, _shape(x_MK), spec)

    def quantize_transposed(self, x_MK: Tensor, spec: QuantSpec) -> Quantized:
        from threefold.engine.precision.quantize_for_cublas import quantize_blocks

        _, (value, scale) = quantize_blocks(
            _contiguous_rows(x_MK), rows=False, columns=True, square=_has_square_blocks(spec)
        )
        return Quantized(value, scale, None, _shape(x_MK.T), spec)

    def quantize_both(self, x_MK: Tensor, spec: QuantSpec, spec_t: QuantSpec) -> tuple[Quantized, Quantized]:
        from threefold.engine.precision.quantize_for_cublas import quantize_blocks

        rows, columns = quantize_blocks(
            _contiguous_rows(x_MK), rows=True, columns=True, square=_has_square_blocks(spec_t)
        )
        return Quantized(*rows, None, _shape(x_MK), spec), Quantized(*columns, None, _shape(x_MK.T), spec_t)

    def quantize_weight(self, weight_MK: Tensor, spec: QuantSpec) -> tuple[Quantized, Quantized]:
        made = self.quantize_weights([weight_MK], spec)
        return made.forward[0], made.transposed[0]

    def quantize_weights(self, weights: Sequence[Tensor], spec: QuantSpec) -> QuantizedWeights:
        from threefold.engine.precision.quantize_for_cublas import quantize_square_blocks

        if not can_join(weights, spec):
            return super().quantize_weights(weights, spec)
        forward, transposed = quantize_square_blocks([_contiguous_rows(weight) for weight in weights])
        shape_t = weights[0].shape[1], sum(len(weight) for weight in weights)
        return QuantizedWeights(
            tuple(Quantized(*one, None, _shape(weight), spec) for one, weight in zip(forward, weights, strict=True)),
            (Quantized(*transposed, None, shape_t, spec),),
        )

    def quantize_joined(
        self, parts: Sequence[Tensor], spec: QuantSpec | None, spec_t: QuantSpec | None
    ) -> tuple[Quantized | None, Quantized | None]:
        from threefold.engine.precision.quantize_for_cublas import quantize_blocks

        square = spec_t is not None and _has_square_blocks(spec_t)
        given = [_contiguous_rows(part) for part in parts]
        rows, columns = quantize_blocks(given, spec is not None, spec_t is not None, square)
        M, K = len(parts[0]), sum(part.shape[1] for part in parts)
        return (
            None if spec is None else Quantized(*rows, None, (M, K), spec),
            None if spec_t is None else Quantized(*columns, None, (K, M), spec_t),
        )

    def matmul(self, a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
        square = _has_square_blocks(b_NK.spec)
        kind = F.ScalingType.BlockWise128x128 if square else F.ScalingType.BlockWise1x128
        scales_b = b_NK.scales.T if square else b_NK.scales
        out = F.scaled_mm(
            a_MK.values, b_NK.values.T, a_MK.scales, F.ScalingType.BlockWise1x128, scales_b, kind, output_dtype=dtype
        )
        return out if out.shape[1] == b_NK.shape[0] else out[:, : b_NK.shape[0]].contiguous()


class RowwiseBackend(BlockwiseBackend):
    """FP8 with one scale per row, or one for the whole matrix; weight gradients in blocks where the recipe says so."""

    def quantize_rows(self, x_MK: Tensor, spec: QuantSpec) -> Quantized:
        assert spec.format.dtype is not None
        if spec.block == (1, None):
            from threefold.engine.kernels.fp8.rowwise_kernels import quantize_rows

            made = quantize_rows(x_MK.contiguous(), None)
            return Quantized(made.value_RK, made.scale_CR.T, None, _shape(x_MK), spec)
        amax = torch.linalg.vector_norm(x_MK, float("inf")).to(torch.float32)
        scale = fp32_scales(amax, spec.format).view(1, 1)
        values = (x_MK / scale).clamp_(-spec.format.max_value, spec.format.max_value).to(spec.format.dtype)
        return Quantized(values, scale, None, _shape(x_MK), spec)

    def quantize_transposed(self, x_MK: Tensor, spec: QuantSpec) -> Quantized:
        return (
            super().quantize_transposed(x_MK, spec)
            if _has_column_blocks(spec)
            else self.quantize_rows(x_MK.T.contiguous(), spec)
        )

    def quantize_both(self, x_MK: Tensor, spec: QuantSpec, spec_t: QuantSpec) -> tuple[Quantized, Quantized]:
        return self.quantize_rows(x_MK, spec), self.quantize_transposed(x_MK, spec_t)

    quantize_weight = EmulatedBackend.quantize_weight
    quantize_weights = EmulatedBackend.quantize_weights
    quantize_joined = EmulatedBackend.quantize_joined

    def matmul(self, a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
        if _has_column_blocks(a_MK.spec):
            return super().matmul(a_MK, b_NK, dtype)
        return torch._scaled_mm(
            a_MK.values,
            b_NK.values.T,
            scale_a=a_MK.scales,
            scale_b=b_NK.scales.T,
            out_dtype=dtype,
            use_fast_accum=False,
        )


def can_join(weights: Sequence[Tensor], spec: QuantSpec) -> bool:
    """Whether no block of 128 would hold rows of two of these weights, (O, I), if one followed the other."""
    return spec.block == (_BLOCK, _BLOCK) and all(len(weight) % _BLOCK == 0 for weight in weights[:-1])


def _has_column_blocks(spec: QuantSpec) -> bool:
    return spec.block[1] is not None


def _has_square_blocks(spec: QuantSpec) -> bool:
    return spec.block[0] != 1


class MicroscalingBackend(EmulatedBackend):
    """MXFP8 and NVFP4 on Blackwell: short blocks, with scales in the order that the tensor cores read them."""

    def matmul(self, a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
        nv = a_MK.spec.scale == "e4m3"
        kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise] if nv else [F.ScalingType.BlockWise1x32]
        orders = [F.SwizzleType.SWIZZLE_32_4_4, *([F.SwizzleType.NO_SWIZZLE] if nv else [])]
        a, b = (x.values.view(torch.float4_e2m1fn_x2) if nv else x.values for x in (a_MK, b_NK))
        return F.scaled_mm(
            a,
            b.T,
            _swizzled_scales(a_MK),
            kinds,
            _swizzled_scales(b_NK),
            kinds,
            swizzle_a=orders,
            swizzle_b=orders,
            output_dtype=dtype,
        )


def _swizzled_scales(x: Quantized) -> list[Tensor]:
    """The scales as `scaled_mm` reads them: one for each row and block, swizzled; then the global scale, if any."""
    scales, block_rows = x.scales, x.spec.block[0] or 1
    if block_rows > 1:
        scales = scales.view(torch.uint8).repeat_interleave(block_rows, 0).view(scales.dtype)
    packed = swizzle_scales(scales[: x.shape[0]])
    return [packed] if x.global_scale is None else [packed, x.global_scale.view(1)]


class SimulatedBackend(EmulatedBackend):
    """The backend of a dry run: it allocates the outputs of the GPU kernels, and computes nothing."""

    def quantize_rows(self, x_MK: Tensor, spec: QuantSpec) -> Quantized:
        return self._empty(x_MK, _shape(x_MK), spec)

    def quantize_transposed(self, x_MK: Tensor, spec: QuantSpec) -> Quantized:
        return self._empty(x_MK, _shape(x_MK.T), spec)

    def quantize_weights(self, weights: Sequence[Tensor], spec: QuantSpec) -> QuantizedWeights:
        if not can_join(weights, spec):
            return super().quantize_weights(weights, spec)
        shape_t = weights[0].shape[1], sum(len(weight) for weight in weights)
        forward = tuple(self._empty(weight, _shape(weight), spec) for weight in weights)
        return QuantizedWeights(forward, (self._empty(weights[0], shape_t, spec),))

    def quantize_joined(
        self, parts: Sequence[Tensor], spec: QuantSpec | None, spec_t: QuantSpec | None
    ) -> tuple[Quantized | None, Quantized | None]:
        M, K = len(parts[0]), sum(part.shape[1] for part in parts)
        rows = None if spec is None else self._empty(parts[0], (M, K), spec)
        return rows, None if spec_t is None else self._empty(parts[0], (K, M), spec_t)

    def _empty(self, like: Tensor, shape: tuple[int, int], spec: QuantSpec) -> Quantized:
        (M, K), (block_rows, block_columns) = shape, spec.block
        multiple = 1 if spec.format.dtype is None else block_columns or 1
        width = -(-K // multiple) * multiple
        values = like.new_empty(M, width if spec.format.dtype else -(-K // 2), dtype=spec.format.dtype or torch.uint8)
        scale_dtype = _SCALE_DTYPES.get(spec.scale, torch.float32)
        scales = like.new_empty(-(-M // (block_rows or M)), -(-K // (block_columns or K)), dtype=scale_dtype)
        global_scale = like.new_empty((), dtype=torch.float32) if spec.scale == "e4m3" else None
        return Quantized(values, scales, global_scale, shape, spec)

    def matmul(self, a_MK: Quantized, b_NK: Quantized, dtype: torch.dtype) -> Tensor:
        return a_MK.values.new_empty(a_MK.shape[0], b_NK.shape[0], dtype=dtype)


def _contiguous_rows(x_MK: Tensor) -> Tensor:
    return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()


def _shape(x_MK: Tensor) -> tuple[int, int]:
    return x_MK.shape[0], x_MK.shape[1]


def native_backend(recipe: Recipe, major: int) -> EmulatedBackend | None:
    """The backend of devices with this major compute capability for the recipe, or None."""
    in_blocks = find_spec("triton") is not None and hasattr(F, "scaled_mm") and major == 9
    if recipe.name == "fp8-blockwise" and in_blocks:
        return BlockwiseBackend()
    if (recipe.name == "fp8-rowwise" and in_blocks) or (recipe.name == "fp8-cs" and major in (9, 10)):
        return RowwiseBackend()
    if major == 10 and recipe.name in ("mxfp8", "nvfp4"):
        return MicroscalingBackend()
    return None


@cache
def compute_capability_major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def sizes_are_aligned(sizes: tuple[int, ...], float_format: FloatFormat = E4M3) -> bool:
    """Whether the kernels take matrices of these sizes; others are emulated."""
    step = _ALIGN if float_format.dtype is not None else 2 * _ALIGN
    return all(size and size % step == 0 for size in sizes)


def swizzle_scales(scales_Mk: Tensor) -> Tensor:
    """Scales as Blackwell's tensor cores read them, flat: tiles of 128 rows x 4 columns, padded to whole tiles.

    Inside a tile the scale of row r and column c is number (r % 32) * 16 + (r // 32) * 4 + c: NVIDIA cuBLAS
    documentation, "1D block scaling factors layout".
    """
    dtype, (rows, columns) = scales_Mk.dtype, scales_Mk.shape
    whole = F.pad(scales_Mk.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = whole.view(-(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(dtype)


EMULATED, SIMULATED = EmulatedBackend(), SimulatedBackend()


def choose_backend(recipe: Recipe, x_TI: Tensor, weights: Sequence[Tensor]) -> EmulatedBackend:
    """The backend for this input and these weights, (O, I). Without weights nothing is multiplied, and any sizes do."""
    if is_simulated():
        return SIMULATED
    if not x_TI.is_cuda or x_TI.dtype != torch.bfloat16:
        return EMULATED
    sizes = (*x_TI.shape, *(len(weight) for weight in weights)) if weights else ()
    found = native_backend(recipe, compute_capability_major(x_TI.device))
    return found if found is not None and sizes_are_aligned(sizes, recipe.input.format) else EMULATED
