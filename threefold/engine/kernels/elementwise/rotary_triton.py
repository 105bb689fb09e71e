"""The Triton kernels of `rotary.py`.

A program takes a tile of heads and splits each head into three parts: the first dims of the rotated pairs, their second
dims, and the rest, which is not rotated. The result has all first dims before all second dims, whether or not the input
is interleaved.

Shapes: T tokens, H heads, d head dim, N = T * H, F frequencies, P programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from functools import cache

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.rms_norm_triton import load_weight
from threefold.engine.kernels.elementwise.rotary import RotaryOptions
from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2

_VALUES_PER_TILE = 4096


@cache
def _sizes(num_tokens: int, heads: int, dim: int, freqs: int) -> dict[str, int]:
    rest = dim - 2 * freqs
    padded_dim = 2 * next_power_of_2(freqs) + (next_power_of_2(rest) if rest else 0)
    rows = max(1, min(_VALUES_PER_TILE // next_power_of_2(padded_dim), next_power_of_2(num_tokens * heads)))
    return {
        "H": heads,
        "DIM": dim,
        "F": freqs,
        "NF": next_power_of_2(freqs),
        "REST": rest,
        "NREST": next_power_of_2(max(rest, 1)),
        "ROWS": rows,
    }


def launch_rotate(
    x_THd: Tensor, weight_d: Tensor | None, cos: Tensor, sin: Tensor, out_BSHd: Tensor, options: RotaryOptions
) -> None:
    num_rows, sizes = x_THd.shape[0] * x_THd.shape[1], _sizes(*x_THd.shape, cos.shape[-1])
    _rotate[(cdiv(num_rows, sizes["ROWS"]),)](
        x_THd, weight_d, cos, sin, out_BSHd, num_rows, x_THd.stride(0), x_THd.stride(1), EPS=options.eps,
        INTERLEAVED=options.interleaved, NORM=weight_d is not None, CENTERED=options.zero_centered, **sizes,
    )  # fmt: skip


def launch_rotate_grad(
    grad_THd: Tensor,
    x_THd: Tensor | None,
    weight_d: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    out_BSHd: Tensor,
    part_Pd: Tensor | None,
    options: RotaryOptions,
) -> None:
    num_rows, sizes = grad_THd.shape[0] * grad_THd.shape[1], _sizes(*grad_THd.shape, cos.shape[-1])
    programs = cdiv(num_rows, sizes["ROWS"]) if part_Pd is None else len(part_Pd)
    strides = (0, 0) if x_THd is None else (x_THd.stride(0), x_THd.stride(1))
    _rotate_grad[(programs,)](
        grad_THd, x_THd, weight_d, cos, sin, out_BSHd, part_Pd, num_rows, grad_THd.stride(0), grad_THd.stride(1),
        *strides, EPS=options.eps, INTERLEAVED=options.interleaved, NORM=weight_d is not None,
        CENTERED=options.zero_centered, **sizes,
    )  # fmt: skip


@triton.jit
def _head_columns(F: tl.constexpr, NF: tl.constexpr, NREST: tl.constexpr, INTERLEAVED: tl.constexpr):
    """-> (frequency, column of the first dim of its pair, column of the second, columns of the rest) in the input."""
    f = tl.arange(0, NF)
    rest = 2 * F + tl.arange(0, NREST)
    if INTERLEAVED:
        return f, 2 * f, 2 * f + 1, rest
    else:  # noqa: RET505 - Triton compiles what follows a return under a constant condition
        return f, f, F + f, rest


@triton.jit
def _head_offset(token, row, token_stride, head_stride, H: tl.constexpr):
    """The offset of each head, in 64 bits: heads may lie further apart than tokens, in a long sequence more than
    2^31."""
    return token * token_stride + (row % H).to(tl.int64) * head_stride


@triton.jit
def _load(ptr, offset, col, mask):
    return tl.load(ptr + offset[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)


@fast_launch
@triton.jit
def _rotate(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, token_stride, head_stride, EPS: tl.constexpr,
    H: tl.constexpr, DIM: tl.constexpr, F: tl.constexpr, NF: tl.constexpr, REST: tl.constexpr, NREST: tl.constexpr,
    ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    token = (row // H).to(tl.int64)
    offset = _head_offset(token, row, token_stride, head_stride, H)
    f, first_col, second_col, rest_col = _head_columns(F, NF, NREST, INTERLEAVED)
    rotated = live[:, None] & (f < F)[None, :]
    unrotated = live[:, None] & (tl.arange(0, NREST) < REST)[None, :]
    first = _load(x_ptr, offset, first_col, rotated)
    second = _load(x_ptr, offset, second_col, rotated)
    if REST > 0:
        rest = _load(x_ptr, offset, rest_col, unrotated)
    if NORM:
        square = tl.sum(first * first + second * second, 1)
        if REST > 0:
            square += tl.sum(rest * rest, 1)
            rest_weight = load_weight(weight_ptr, rest_col, tl.arange(0, NREST) < REST, dtype, CENTERED)
        rstd = tl.rsqrt(square / DIM + EPS)[:, None]
        first *= rstd * load_weight(weight_ptr, first_col, f < F, dtype, CENTERED)[None, :]
        second *= rstd * load_weight(weight_ptr, second_col, f < F, dtype, CENTERED)[None, :]
        if REST > 0:
            rest *= rstd * rest_weight[None, :]
    cos = _load(cos_ptr, token * F, f, rotated)
    sin = _load(sin_ptr, token * F, f, rotated)
    out = out_ptr + row.to(tl.int64)[:, None] * DIM
    tl.store(out + f[None, :], (first * cos - second * sin).to(dtype), mask=rotated)
    tl.store(out + (F + f)[None, :], (second * cos + first * sin).to(dtype), mask=rotated)
    if REST > 0:
        tl.store(out + rest_col[None, :], rest.to(dtype), mask=unrotated)


@fast_launch
@triton.jit
def _rotate_grad(
    grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, part_ptr, num_rows, grad_token_stride, grad_head_stride,
    token_stride, head_stride, EPS: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr, F: tl.constexpr, NF: tl.constexpr,
    REST: tl.constexpr, NREST: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    f, first_col, second_col, rest_col = _head_columns(F, NF, NREST, INTERLEAVED)
    rest_mask = tl.arange(0, NREST) < REST
    if NORM:
        first_weight = load_weight(weight_ptr, first_col, f < F, dtype, CENTERED)[None, :]
        second_weight = load_weight(weight_ptr, second_col, f < F, dtype, CENTERED)[None, :]
        rest_weight = load_weight(weight_ptr, rest_col, rest_mask, dtype, CENTERED)[None, :]
    # Parts of the weight's gradient, one for each row of the tile; they are summed only once, at the end.
    first_part = tl.zeros((ROWS, NF), tl.float32)
    second_part = tl.zeros((ROWS, NF), tl.float32)
    rest_part = tl.zeros((ROWS, NREST), tl.float32)
    for first_row in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first_row + tl.arange(0, ROWS)
        live = row < num_rows
        token = (row // H).to(tl.int64)
        offset = _head_offset(token, row, grad_token_stride, grad_head_stride, H)
        rotated = live[:, None] & (f < F)[None, :]
        unrotated = live[:, None] & rest_mask[None, :]
        left = _load(grad_ptr, offset, f, rotated)
        right = _load(grad_ptr, offset, F + f, rotated)
        cos = _load(cos_ptr, token * F, f, rotated)
        sin = _load(sin_ptr, token * F, f, rotated)
        first_grad = left * cos + right * sin
        second_grad = right * cos - left * sin
        if REST > 0:
            rest_grad = _load(grad_ptr, offset, rest_col, unrotated)
        if NORM:
            offset = _head_offset(token, row, token_stride, head_stride, H)
            first = _load(x_ptr, offset, first_col, rotated)
            second = _load(x_ptr, offset, second_col, rotated)
            square = tl.sum(first * first + second * second, 1)
            slope = tl.sum(first_grad * first_weight * first + second_grad * second_weight * second, 1)
            if REST > 0:
                rest = _load(x_ptr, offset, rest_col, unrotated)
                square += tl.sum(rest * rest, 1)
                slope += tl.sum(rest_grad * rest_weight * rest, 1)
            rstd = tl.rsqrt(square / DIM + EPS)
            slope = (slope * rstd * rstd / DIM)[:, None]
            rstd = rstd[:, None]
            first_part += first_grad * first * rstd
            second_part += second_grad * second * rstd
            first_grad = (first_grad * first_weight - first * slope) * rstd
            second_grad = (second_grad * second_weight - second * slope) * rstd
            if REST > 0:
                rest_part += rest_grad * rest * rstd
                rest_grad = (rest_grad * rest_weight - rest * slope) * rstd
        out = out_ptr + row.to(tl.int64)[:, None] * DIM
        tl.store(out + first_col[None, :], first_grad.to(dtype), mask=rotated)
        tl.store(out + second_col[None, :], second_grad.to(dtype), mask=rotated)
        if REST > 0:
            tl.store(out + rest_col[None, :], rest_grad.to(dtype), mask=unrotated)
    if NORM:
        part = part_ptr + tl.program_id(0) * DIM
        tl.store(part + first_col, tl.sum(first_part, 0), mask=f < F)
        tl.store(part + second_col, tl.sum(second_part, 0), mask=f < F)
        if REST > 0:
            tl.store(part + rest_col, tl.sum(rest_part, 0), mask=rest_mask)
