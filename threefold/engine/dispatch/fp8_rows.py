"""The all-to-all of rows in FP8 (knob `fp8_dispatch`): half the bytes of bf16 on the way to the experts.

A packed row has one byte for each number, followed by one byte for each block of 128, the exponent of its scale. Scales
are powers of two, so dequantizing to bf16 is exact, and quantizing again in the same blocks, as experts in
fp8-blockwise do, changes nothing. Gradients travel unquantized. `AllToAllDispatcher` calls this module.

Shapes: S rows sent, P rows received, D model dim, B = D + D / 128 bytes of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.engine.context import count_event
from threefold.engine.device import is_simulated
from threefold.engine.dispatch.async_exchange import AsyncExchange, Wait, start_all_to_all
from threefold.engine.dist.collectives import all_to_all
from threefold.engine.dist.mesh import Group
from threefold.engine.precision.choose_backend import choose_backend
from threefold.engine.precision.quantize import Quantized
from threefold.engine.precision.recipes import RECIPES

_RECIPE = RECIPES["fp8-blockwise"]
_BLOCK, _MANTISSA = 128, 23


def fp8_all_to_all_exchange(group: Group, sizes: Sequence[int], out_sizes: Sequence[int]) -> AsyncExchange | None:
    """`all_to_all_exchange` that quantizes the first tensor, the rows; the tensors behind it travel as they are."""
    if group.is_trivial:
        return None

    def forward(x_SD: Tensor, *others: Tensor) -> tuple[Sequence[Tensor], Wait]:
        count_event("rows in FP8", "sent")
        packed_SB = pack_fp8(x_SD)
        packed_PB = packed_SB.new_empty(sum(out_sizes), packed_SB.shape[1])
        pending = all_to_all(packed_PB, packed_SB, group, out_sizes, sizes)
        out, wait_for_others = start_all_to_all(others, group, out_sizes, sizes)
        x_PD = x_SD.new_empty(sum(out_sizes), x_SD.shape[1])

        def wait() -> None:
            pending.wait()
            wait_for_others()
            x_PD.copy_(unpack_fp8(packed_PB, x_PD.dtype))

        return [x_PD, *out], wait

    def backward(*grads: Tensor) -> tuple[Sequence[Tensor], Wait]:
        return start_all_to_all(grads, group, sizes, out_sizes)

    return AsyncExchange(forward, backward)


def pack_fp8(x_SD: Tensor) -> Tensor:
    """Rows as bytes: values, then exponents of the scales."""
    if is_simulated():
        return x_SD.new_empty(len(x_SD), x_SD.shape[1] + x_SD.shape[1] // _BLOCK, dtype=torch.uint8)
    quantized = choose_backend(_RECIPE, x_SD, ()).quantize_rows(x_SD, _RECIPE.input)
    exponents = quantized.scales.contiguous().view(torch.int32) >> _MANTISSA
    return torch.cat([quantized.values.view(torch.uint8), exponents.to(torch.uint8)], dim=1)


def unpack_fp8(packed_PB: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of `pack_fp8`, dequantized to `dtype`."""
    rows, width = len(packed_PB), packed_PB.shape[1] * _BLOCK // (_BLOCK + 1)
    if is_simulated():
        return packed_PB.new_empty(rows, width, dtype=dtype)
    values, exponents = packed_PB.split([width, width // _BLOCK], dim=1)
    scales = (exponents.to(torch.int32) << _MANTISSA).view(torch.float32)
    return Quantized(values.view(torch.float8_e4m3fn), scales, None, (rows, width), _RECIPE.input).dequantize(dtype)
