"""The all-to-all of rows in FP8 (knob `fp8_dispatch`): half the bytes of bf16 on the way to the experts.

A packed row has one byte for each number, followed by one byte for each block of 128, the exponent of its scale. Scales
are powers of two, so dequantizing to bf16 is exact, and quantizing again in the same blocks, as experts in
fp8-blockwise do, changes nothing. A token is quantized once and copied to its rows. Gradients travel unquantized.
`AllToAllDispatcher` calls this module.

Shapes: T tokens, S rows sent, P rows received, D model dim, B = D + D / 128 bytes of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.engine.context import count_event
from threefold.engine.device import is_simulated
from threefold.engine.dispatch.async_exchange import AsyncExchange, Wait, start_all_to_all
from threefold.engine.dispatch.rows import RowMap
from threefold.engine.dist.collectives import all_to_all
from threefold.engine.dist.mesh import Group
from threefold.engine.kernels.availability import has_triton_kernels
from threefold.engine.precision.quantize import Quantized, quantize
from threefold.engine.precision.recipes import RECIPES

_RECIPE = RECIPES["fp8-blockwise"]
_BLOCK, _MANTISSA = 128, 23


def fp8_all_to_all_exchange(
    group: Group, sizes: Sequence[int], out_sizes: Sequence[int], rows: RowMap, packed_SB: Tensor
) -> AsyncExchange:
    """`all_to_all_exchange` whose first tensor are tokens, of which `packed_SB` are the rows that are sent; the tensors
    behind it travel as they are."""
    packed = [packed_SB]  # let go of when it is sent

    def forward(x_TD: Tensor, *others: Tensor) -> tuple[Sequence[Tensor], Wait]:
        count_event("rows in FP8", "sent")
        packed_SB = packed.pop()
        packed_PB = packed_SB.new_empty(sum(out_sizes), packed_SB.shape[1])
        pending = all_to_all(packed_PB, packed_SB, group, out_sizes, sizes)
        out, wait_for_others = start_all_to_all(others, group, out_sizes, sizes)
        x_PD = x_TD.new_empty(sum(out_sizes), x_TD.shape[1])

        def wait() -> None:
            pending.wait()
            wait_for_others()
            unpack_fp8(packed_PB, x_PD)

        return [x_PD, *out], wait

    def backward(*grads: Tensor) -> tuple[Sequence[Tensor], Wait]:
        return start_all_to_all(grads, group, sizes, out_sizes)

    def sum_grads(grads: Sequence[Tensor]) -> Sequence[Tensor]:
        return [rows.sum_rows(grads[0]), *grads[1:]]

    return AsyncExchange(forward, backward, sum_grads)


@torch.no_grad()
def pack_fp8(x_TD: Tensor, rows: RowMap) -> Tensor:
    """Rows of tokens as bytes: values, then exponents of the scales."""
    num_bytes = x_TD.shape[1] + x_TD.shape[1] // _BLOCK
    if not is_simulated() and not _runs_fused(x_TD):
        quantized = quantize(x_TD, _RECIPE.input)
        exponents = quantized.scales.contiguous().view(torch.int32) >> _MANTISSA
        packed_TB = torch.cat([quantized.values.view(torch.uint8), exponents.to(torch.uint8)], dim=1)
        return packed_TB[rows.token_R]
    packed_SB = x_TD.new_empty(len(rows.slot_R), num_bytes, dtype=torch.uint8)
    if not is_simulated() and len(x_TD):
        from threefold.engine.kernels.fp8.packed_rows import pack_tokens

        pack_tokens(x_TD.contiguous(), rows.row_TK, packed_SB)
    return packed_SB


def unpack_fp8(packed_PB: Tensor, x_PD: Tensor) -> None:
    """Dequantize the rows of `pack_fp8` into `x_PD`."""
    if is_simulated() or not len(x_PD):
        return
    if _runs_fused(x_PD):
        from threefold.engine.kernels.fp8.packed_rows import unpack_rows

        unpack_rows(packed_PB, x_PD)
        return
    values, exponents = packed_PB.split([x_PD.shape[1], x_PD.shape[1] // _BLOCK], dim=1)
    scales = (exponents.to(torch.int32) << _MANTISSA).view(torch.float32)
    quantized = Quantized(values.view(torch.float8_e4m3fn), scales, None, (len(x_PD), x_PD.shape[1]), _RECIPE.input)
    x_PD.copy_(quantized.dequantize(x_PD.dtype))


def _runs_fused(x: Tensor) -> bool:
    return has_triton_kernels(x.device) and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
