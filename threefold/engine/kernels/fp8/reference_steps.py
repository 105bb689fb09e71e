"""The steps of the FP8 experts in plain torch: the same quantized values as the kernels, multiplied in fp32.

They run on any device, are slow and wait for the token counts. `fused_experts` uses them where there are no kernels,
and tests compare the kernels with them bit for bit.

Shapes: R rows sorted by expert, K columns, C blocks of columns, B blocks of rows, P = B * BLOCK rows with each expert's
padded to whole blocks, E experts, H expert dim, X = 2 H, O rows of a weight, I its columns, N columns of a result; the
first dim of x_XK is the number of tokens where `rows` are given and R otherwise.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.autograd.main_grad import add_to_main_grad
from threefold.engine.kernels.elementwise.swiglu_torch import gated_activation
from threefold.engine.kernels.experts.sorted_rows import SortedRows
from threefold.engine.kernels.fp8.quantized_tensors import (
    BLOCK,
    E4M3,
    E4M3_MAX,
    SMALLEST_SCALE,
    Fp8Columns,
    Fp8Rows,
    Fp8Weight,
    max_row_blocks,
    num_blocks,
)


def power_of_two_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of blocks with this amax, and its inverse, by which the values are multiplied to quantize them."""
    part, exponent = torch.frexp(amax.float())  # part in [0.5, 1), and 448 = 0.875 * 2 ** 9
    exponent = (exponent - 9 + (part > 0.875)).clamp_min(-126).where(amax != 0, 0)
    one = torch.ones_like(part)
    return torch.ldexp(one, exponent).where(amax.isfinite(), torch.inf), torch.ldexp(one, -exponent)


def quantize_rows(x_RK: Tensor) -> Fp8Rows:
    """Rows in 1x128 blocks with power-of-two scales."""
    width = x_RK.shape[1]
    x_RCB = _pad_to_blocks(x_RK.float(), 1).unflatten(1, (-1, BLOCK))
    scale_RC, inverse_RC = power_of_two_scale(x_RCB.abs().amax(dim=2))
    value_RK = (x_RCB * inverse_RC[..., None]).flatten(1)[:, :width].to(E4M3)
    return Fp8Rows(value_RK.contiguous(), scale_RC.T.contiguous())


def quantize_rows_rowwise(x_RK: Tensor) -> Fp8Rows:
    """Rows with one fp32 scale each."""
    scale_R = fp32_scale(x_RK.float().abs().amax(dim=1))
    return Fp8Rows((x_RK.float() / scale_R[:, None]).to(E4M3), scale_R[None])


def quantize_weight_rowwise(weight_EOI: Tensor) -> Fp8Weight:
    """A weight with one fp32 scale for each row, and its transpose likewise."""
    weight_fp32_EOI = weight_EOI.float()
    scale_EO, scale_EI = fp32_scale(weight_fp32_EOI.abs().amax(dim=2)), fp32_scale(weight_fp32_EOI.abs().amax(dim=1))
    transposed = (weight_fp32_EOI / scale_EI[:, None, :]).to(E4M3).mT.contiguous()
    return Fp8Weight((weight_fp32_EOI / scale_EO[..., None]).to(E4M3), transposed, scale_EO, scale_EI)


def fp32_scale(amax: Tensor) -> Tensor:
    """The scale by which `amax` becomes 448; SMALLEST_SCALE at least, 1 for zeros."""
    # The divisor is a tensor: CUDA would multiply by the inverse of a Python number, which rounds otherwise.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    return scale.clamp_min(SMALLEST_SCALE).where(amax != 0, 1.0)


def quantize_weight(weight_EOI: Tensor) -> Fp8Weight:
    """A weight in 128x128 blocks with fp32 scales."""
    outer, inner = weight_EOI.shape[1:]
    blocks = (
        _pad_to_blocks(_pad_to_blocks(weight_EOI.float(), 1), 2).unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    )
    scale = fp32_scale(blocks.abs().amax(dim=(2, 4)))
    value = (blocks / scale[:, :, None, :, None]).flatten(3).flatten(1, 2)[:, :outer, :inner].to(E4M3).contiguous()
    return Fp8Weight(value, value.mT.contiguous(), scale, scale.mT)


def dequantize_rows(quantize_input_rows: Fp8Rows) -> Tensor:
    scale_RC = quantize_input_rows.scale_CR.T
    if scale_RC.shape[1] > 1:
        scale_RC = scale_RC.repeat_interleave(BLOCK, 1)[:, : quantize_input_rows.value_RK.shape[1]]
    return quantize_input_rows.value_RK.float() * scale_RC


def dequantize_weight(value_EOI: Tensor, scale: Tensor) -> Tensor:
    if scale.dim() == 2:
        return value_EOI.float() * scale[..., None]
    outer, inner = value_EOI.shape[1:]
    spread = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return value_EOI.float() * spread[:, :outer, :inner]


def dequantize_columns(fp8_columns: Fp8Columns) -> Tensor:
    """The rows of all experts, padded to whole blocks, (P, K). Blocks that are not in use hold anything."""
    value_PK, scale = fp8_columns.value_KP.T, fp8_columns.scale
    if scale.shape[1] != value_PK.shape[1]:
        scale = scale.repeat_interleave(BLOCK, 1)[:, : value_PK.shape[1]]
    return value_PK.float() * scale.repeat_interleave(BLOCK, 0)


class BlockwiseReferenceSteps:
    """The blockwise recipe: 1x128 scales on rows, 128x128 on weights. `ends_E` holds the end of each expert's rows."""

    quantize_input_rows = staticmethod(quantize_rows)

    def __init__(self, ends_E: Tensor, num_rows: int, clamped: bool) -> None:
        self.clamped, self.max_blocks = clamped, max_row_blocks(num_rows, len(ends_E))
        self.expert_rows = [slice(a, b) for a, b in pairwise([0, *ends_E.tolist()])]
        starts = [0]
        for part in self.expert_rows:
            starts.append(starts[-1] + num_blocks(part.stop - part.start) * BLOCK)
        self.padded_rows = [slice(a, b) for a, b in pairwise(starts)]  # where the rows of each expert lie among P

    def quantize(
        self, x_XK: Tensor, rows: SortedRows | None, with_columns: bool, square: bool
    ) -> tuple[Fp8Rows, Fp8Columns | None]:
        """Quantize by rows, and by columns if `with_columns`, which then have 128x128 blocks if `square`, else 128x1.

        With `rows`, x has one row per token, and each row reads its token.
        """
        x_RK = x_XK if rows is None else x_XK[rows.token_R]
        return self.quantize_input_rows(x_RK), self.quantize_columns(x_RK, square) if with_columns else None

    def quantize_columns(self, x_RK: Tensor, square: bool) -> Fp8Columns:
        width = x_RK.shape[1]
        x_PK = x_RK.new_zeros(self.max_blocks * BLOCK, width, dtype=torch.float32)
        for part, padded in zip(self.expert_rows, self.padded_rows, strict=True):
            x_PK[padded.start : padded.start + part.stop - part.start] = x_RK[part].float()
        x_BNK = x_PK.unflatten(0, (-1, BLOCK))
        amax = x_BNK.abs().amax(dim=1)
        if square:
            amax = _pad_to_blocks(amax, 1).unflatten(1, (-1, BLOCK)).amax(dim=2)
        scale, inverse = power_of_two_scale(amax)
        if square:
            inverse = inverse.repeat_interleave(BLOCK, 1)[:, :width]
        value_PK = (x_BNK * inverse[:, None]).flatten(0, 1).to(E4M3)
        return Fp8Columns(value_PK.T.contiguous(), scale)

    def grouped_gemm(self, a_fp8: Fp8Rows, value_ENK: Tensor, scale: Tensor, rows: SortedRows | None = None) -> Tensor:
        """Rows of the result, summed by token with `rows`."""
        a_RK, weight_ENK = dequantize_rows(a_fp8), dequantize_weight(value_ENK, scale)
        made = [a_RK[part] @ weight.T for part, weight in zip(self.expert_rows, weight_ENK, strict=True)]
        y_RN = torch.cat(made).to(torch.bfloat16)
        return y_RN if rows is None else y_RN[rows.row_TK].sum(dim=1)

    def wgrad(
        self, left_fp8: Fp8Columns, right_fp8: Fp8Columns, dtype: torch.dtype, main_grad: Tensor | None = None
    ) -> Tensor | None:
        """The weight gradient; with a `main_grad` it is added there, and None comes back."""
        left_PM, right_PN = dequantize_columns(left_fp8), dequantize_columns(right_fp8)
        grad_EMN = torch.stack([left_PM[padded].T @ right_PN[padded] for padded in self.padded_rows])
        return add_to_main_grad(grad_EMN if main_grad is not None else grad_EMN.to(dtype), main_grad)

    def swiglu(self, gate_up_RX: Tensor, weight_R: Tensor) -> Fp8Rows:
        gate_RH, up_RH = gate_up_RX.float().chunk(2, dim=-1)
        return self.quantize_input_rows(gated_activation(gate_RH, up_RH, self.clamped) * weight_R[:, None])

    def swiglu_grad(
        self, grad_RH: Tensor, gate_up_RX: Tensor, weight_R: Tensor, wants_gate_up: bool, wants_act: bool
    ) -> tuple[Fp8Rows, Fp8Columns | None, Fp8Columns | None, Tensor]:
        """Differentiate the weighted activation, whose gradient is `grad_RH`.

        Returns the gradient of gate_up_RX by rows, the same by columns if `wants_gate_up`, the weighted activation by
        columns in 128x128 blocks if `wants_act`, and the gradient of weight_R.
        """
        with torch.enable_grad():
            gate_up_fp32_RX, weight_R = gate_up_RX.float().requires_grad_(), weight_R.detach().requires_grad_()
            gate_RH, up_RH = gate_up_fp32_RX.chunk(2, dim=-1)
            act_RH = gated_activation(gate_RH, up_RH, self.clamped) * weight_R[:, None]
            grad_RX, weight_grad_R = torch.autograd.grad(act_RH, (gate_up_fp32_RX, weight_R), grad_RH.to(act_RH.dtype))
        grad_fp8 = self.quantize_columns(grad_RX, square=False) if wants_gate_up else None
        act_fp8 = self.quantize_columns(act_RH.detach(), square=True) if wants_act else None
        return self.quantize_input_rows(grad_RX), grad_fp8, act_fp8, weight_grad_R


class RowwiseReferenceSteps(BlockwiseReferenceSteps):
    """The rowwise recipe: one scale per row. Weight gradients still sum over blocks of 128 rows."""

    quantize_input_rows = staticmethod(quantize_rows_rowwise)


def _pad_to_blocks(x: Tensor, dim: int) -> Tensor:
    """Pad `dim` with zeros to whole blocks."""
    missing = -x.shape[dim] % BLOCK
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x
