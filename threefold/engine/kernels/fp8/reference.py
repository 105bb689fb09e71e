"""The steps of the FP8 experts as plain torch: the same quantised values as the kernels', multiplied in fp32.
Any device; slow; waits for the counts.

Shapes: R rows sorted by expert, K columns, C blocks of columns, B blocks of rows, P = B * BLOCK rows with each expert's
filled up, E experts, H expert dim, X = 2 H, O rows of a weight, I its columns, N columns of a result.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.kernels.fp8.format import (
    BLOCK,
    E4M3,
    LARGEST,
    SMALLEST_SCALE,
    Columns8,
    Rows8,
    Weight8,
    most_blocks,
    num_blocks,
)
from threefold.engine.kernels.reference import activation
from threefold.engine.kernels.sort import Rows


def scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks with these magnitudes -> (scale, by what to multiply to quantise)."""
    part, exponent = torch.frexp(largest.float())  # part in [0.5, 1), and 448 = 0.875 * 2 ** 9
    exponent = (exponent - 9 + (part > 0.875)).clamp_min(-126).where(largest != 0, 0)
    one = torch.ones_like(part)
    return torch.ldexp(one, exponent).where(largest.isfinite(), torch.inf), torch.ldexp(one, -exponent)


def quantize_rows(x_RK: Tensor) -> Rows8:
    width = x_RK.shape[1]
    x_RCB = _filled(x_RK.float(), 1).unflatten(1, (-1, BLOCK))
    scale_RC, inverse_RC = scales(x_RCB.abs().amax(dim=2))
    value_RK = (x_RCB * inverse_RC[..., None]).flatten(1)[:, :width].to(E4M3)
    return Rows8(value_RK.contiguous(), scale_RC.T.contiguous())


def quantize_whole_rows(x_RK: Tensor) -> Rows8:
    """One scale, any number, for each row."""
    scale_R = any_scale(x_RK.float().abs().amax(dim=1))
    return Rows8((x_RK.float() / scale_R[:, None]).to(E4M3), scale_R[None])


def quantize_weight_rows(weight_EOI: Tensor) -> Weight8:
    wide = weight_EOI.float()
    scale_EO, scale_EI = any_scale(wide.abs().amax(dim=2)), any_scale(wide.abs().amax(dim=1))
    turned = (wide / scale_EI[:, None, :]).to(E4M3).mT.contiguous()
    return Weight8((wide / scale_EO[..., None]).to(E4M3), turned, scale_EO, scale_EI)


def any_scale(largest: Tensor) -> Tensor:
    scale = largest / torch.full_like(largest, LARGEST)  # by a number CUDA would multiply with its inverse
    return scale.clamp_min(SMALLEST_SCALE).where(largest != 0, 1.0)


def quantize_weight(weight_EOI: Tensor) -> Weight8:
    outer, inner = weight_EOI.shape[1:]
    blocks = _filled(_filled(weight_EOI.float(), 1), 2).unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    scale = any_scale(blocks.abs().amax(dim=(2, 4)))
    value = (blocks / scale[:, :, None, :, None]).flatten(3).flatten(1, 2)[:, :outer, :inner].to(E4M3).contiguous()
    return Weight8(value, value.mT.contiguous(), scale, scale.mT)


def widened_rows(rows8: Rows8) -> Tensor:
    scale_RC = rows8.scale_CR.T
    if scale_RC.shape[1] > 1:
        scale_RC = scale_RC.repeat_interleave(BLOCK, 1)[:, : rows8.value_RK.shape[1]]
    return rows8.value_RK.float() * scale_RC


def widened_weight(value_EOI: Tensor, scale: Tensor) -> Tensor:
    if scale.dim() == 2:
        return value_EOI.float() * scale[..., None]
    outer, inner = value_EOI.shape[1:]
    spread = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return value_EOI.float() * spread[:, :outer, :inner]


def widened_columns(columns8: Columns8) -> Tensor:
    """(P, K): blocks not in use hold anything."""
    value_PK, scale = columns8.value_KP.T, columns8.scale
    if scale.shape[1] != value_PK.shape[1]:
        scale = scale.repeat_interleave(BLOCK, 1)[:, : value_PK.shape[1]]
    return value_PK.float() * scale.repeat_interleave(BLOCK, 0)


class Reference8:
    """`ends_E`: the end of each expert's rows."""

    rows8 = staticmethod(quantize_rows)

    def __init__(self, ends_E: Tensor, num_rows: int, clamped: bool) -> None:
        self.clamped, self.num = clamped, most_blocks(num_rows, len(ends_E))
        self.parts = [slice(a, b) for a, b in pairwise([0, *ends_E.tolist()])]
        starts = [0]
        for part in self.parts:
            starts.append(starts[-1] + num_blocks(part.stop - part.start) * BLOCK)
        self.places = [slice(a, b) for a, b in pairwise(starts)]  # of each expert's rows among P

    def quantize(self, x_XK: Tensor, rows: Rows | None, by_column: bool, square: bool) -> tuple[Rows8, Columns8 | None]:
        """A row reads its token of x, or without `rows` its own row. `square`: what the columns share scales in."""
        x_RK = x_XK if rows is None else x_XK[rows.token_R]
        return self.rows8(x_RK), self.quantize_columns(x_RK, square) if by_column else None

    def quantize_columns(self, x_RK: Tensor, square: bool) -> Columns8:
        width = x_RK.shape[1]
        x_PK = x_RK.new_zeros(self.num * BLOCK, width, dtype=torch.float32)
        for part, place in zip(self.parts, self.places, strict=True):
            x_PK[place.start : place.start + part.stop - part.start] = x_RK[part].float()
        x_BNK = x_PK.unflatten(0, (-1, BLOCK))
        largest = x_BNK.abs().amax(dim=1)
        if square:
            largest = _filled(largest, 1).unflatten(1, (-1, BLOCK)).amax(dim=2)
        scale, inverse = scales(largest)
        if square:
            inverse = inverse.repeat_interleave(BLOCK, 1)[:, :width]
        value_PK = (x_BNK * inverse[:, None]).flatten(0, 1).to(E4M3)
        return Columns8(value_PK.T.contiguous(), scale)

    def product(self, a8: Rows8, value_ENK: Tensor, scale: Tensor) -> Tensor:
        a_RK, weight_ENK = widened_rows(a8), widened_weight(value_ENK, scale)
        made = [a_RK[part] @ weight.T for part, weight in zip(self.parts, weight_ENK, strict=True)]
        return torch.cat(made).to(torch.bfloat16)

    def weight_grad(self, left8: Columns8, right8: Columns8, dtype: torch.dtype) -> Tensor:
        left_PM, right_PN = widened_columns(left8), widened_columns(right8)
        return torch.stack([left_PM[place].T @ right_PN[place] for place in self.places]).to(dtype)

    def activated(self, gate_up_RX: Tensor, weight_R: Tensor) -> Rows8:
        gate_RH, up_RH = gate_up_RX.float().chunk(2, dim=-1)
        return self.rows8(activation(gate_RH, up_RH, self.clamped) * weight_R[:, None])

    def activated_grad(
        self, grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, up: bool, act: bool
    ) -> tuple[Rows8, Columns8 | None, Columns8 | None, Tensor]:
        """`grad_RH` of the weighted activation -> (gradient of gate_up_RX by rows, and by columns if `up`; the weighted
        activation by columns, in squares, if `act`; gradient of weight_R)."""
        with torch.enable_grad():
            wide_RX, weight_R = gate_up_RX.float().requires_grad_(), weight_R.detach().requires_grad_()
            gate_RH, up_RH = wide_RX.chunk(2, dim=-1)
            act_RH = activation(gate_RH, up_RH, self.clamped) * weight_R[:, None]
            grad_RX, weight_grad_R = torch.autograd.grad(act_RH, (wide_RX, weight_R), grad_RH.to(act_RH.dtype))
        grad8 = self.quantize_columns(grad_RX, square=False) if up else None
        act8 = self.quantize_columns(act_RH.detach(), square=True) if act else None
        return self.rows8(grad_RX), grad8, act8, weight_grad_R

    def sum_rows(self, y_RD: Tensor, row_TK: Tensor) -> Tensor:
        return y_RD[row_TK].sum(dim=1)


class RowReference8(Reference8):
    rows8 = staticmethod(quantize_whole_rows)


def _filled(x: Tensor, dim: int) -> Tensor:
    """With zeros up to whole blocks."""
    missing = -x.shape[dim] % BLOCK
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x
