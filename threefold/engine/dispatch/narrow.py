"""Rows that travel in FP8: a byte a number, and behind them a byte for each 128, the exponent of their scale.

Scales are powers of two, so that rows of sixteen bits come out exactly as they were rounded, and rounding them again in
the same blocks, as experts in fp8-blockwise do, changes nothing. Gradients travel as they are.

Shapes: S rows sent, P rows that came, D model dim, B = D + D / 128 bytes of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.engine.dispatch.flight import Flight, Wait, start_all
from threefold.engine.mesh import Group
from threefold.engine.precision.choose import products_for
from threefold.engine.precision.quantize import Quantized
from threefold.engine.precision.recipes import RECIPES
from threefold.engine.shard.collectives import all_to_all
from threefold.engine.ways import stood_for

_RECIPE = RECIPES["fp8-blockwise"]
_BLOCK, _MANTISSA = 128, 23


def swap_narrow(group: Group, sizes: Sequence[int], out_sizes: Sequence[int]) -> Flight | None:
    """As `swap`, of rows and whatever else goes with them."""
    if group.alone:
        return None

    def there(x_SD: Tensor, *others: Tensor) -> tuple[Sequence[Tensor], Wait]:
        packed_SB = pack(x_SD)
        packed_PB = packed_SB.new_empty(sum(out_sizes), packed_SB.shape[1])
        pending = all_to_all(packed_PB, packed_SB, group, out_sizes, sizes)
        out, wait_for_others = start_all(others, group, out_sizes, sizes)
        x_PD = x_SD.new_empty(sum(out_sizes), x_SD.shape[1])

        def wait() -> None:
            pending.wait()
            wait_for_others()
            x_PD.copy_(unpack(packed_PB, x_PD.dtype))

        return [x_PD, *out], wait

    def home(*grads: Tensor) -> tuple[Sequence[Tensor], Wait]:
        return start_all(grads, group, sizes, out_sizes)

    return Flight(there, home)


def pack(x_SD: Tensor) -> Tensor:
    if stood_for():
        return x_SD.new_empty(len(x_SD), x_SD.shape[1] + x_SD.shape[1] // _BLOCK, dtype=torch.uint8)
    made = products_for(_RECIPE, x_SD, ()).along_rows(x_SD, _RECIPE.input)
    exponents = made.scales.contiguous().view(torch.int32) >> _MANTISSA
    return torch.cat([made.values.view(torch.uint8), exponents.to(torch.uint8)], dim=1)


def unpack(packed_PB: Tensor, dtype: torch.dtype) -> Tensor:
    rows, width = len(packed_PB), packed_PB.shape[1] * _BLOCK // (_BLOCK + 1)
    if stood_for():
        return packed_PB.new_empty(rows, width, dtype=dtype)
    values, exponents = packed_PB.split([width, width // _BLOCK], dim=1)
    scales = (exponents.to(torch.int32) << _MANTISSA).view(torch.float32)
    return Quantized(values.view(torch.float8_e4m3fn), scales, None, (rows, width), _RECIPE.input).wide(dtype)
