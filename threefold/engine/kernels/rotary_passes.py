"""The passes of `rotary.py`: tiles of heads, each head with its two turning parts and what stays of it.

Shapes: T tokens, H heads, d head dim, N = T * H, F frequencies, P programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from functools import cache

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.norm_passes import read_weight
from threefold.engine.kernels.rotary import Turn

_VALUES = 4096  # of a tile


@cache
def _sizes(num_tokens: int, heads: int, dim: int, freqs: int) -> dict[str, int]:
    rest = dim - 2 * freqs
    wide = 2 * triton.next_power_of_2(freqs) + (triton.next_power_of_2(rest) if rest else 0)
    rows = max(1, min(_VALUES // triton.next_power_of_2(wide), triton.next_power_of_2(num_tokens * heads)))
    return {
        "H": heads,
        "DIM": dim,
        "F": freqs,
        "NF": triton.next_power_of_2(freqs),
        "REST": rest,
        "NREST": triton.next_power_of_2(max(rest, 1)),
        "ROWS": rows,
    }


def launch_turn(x_THd: Tensor, weight_d: Tensor | None, cos: Tensor, sin: Tensor, out_BSHd: Tensor, how: Turn) -> None:
    num_rows, sizes = x_THd.shape[0] * x_THd.shape[1], _sizes(*x_THd.shape, cos.shape[-1])
    _turn[(triton.cdiv(num_rows, sizes["ROWS"]),)](
        x_THd, weight_d, cos, sin, out_BSHd, num_rows, x_THd.stride(0), x_THd.stride(1), EPS=how.eps,
        PAIRS=how.pairs, NORM=weight_d is not None, CENTERED=how.zero_centered, **sizes,
    )  # fmt: skip


def launch_turn_grad(
    grad_THd: Tensor,
    x_THd: Tensor | None,
    weight_d: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    out_BSHd: Tensor,
    part_Pd: Tensor | None,
    how: Turn,
) -> None:
    num_rows, sizes = grad_THd.shape[0] * grad_THd.shape[1], _sizes(*grad_THd.shape, cos.shape[-1])
    programs = triton.cdiv(num_rows, sizes["ROWS"]) if part_Pd is None else len(part_Pd)
    strides = (0, 0) if x_THd is None else (x_THd.stride(0), x_THd.stride(1))
    _turn_grad[(programs,)](
        grad_THd, x_THd, weight_d, cos, sin, out_BSHd, part_Pd, num_rows, grad_THd.stride(0), grad_THd.stride(1),
        *strides, EPS=how.eps, PAIRS=how.pairs, NORM=weight_d is not None, CENTERED=how.zero_centered,
        **sizes,
    )  # fmt: skip


@triton.jit
def _columns(F: tl.constexpr, NF: tl.constexpr, NREST: tl.constexpr, PAIRS: tl.constexpr):
    """Of a head as it comes in: its two turning parts and the rest."""
    f = tl.arange(0, NF)
    rest = 2 * F + tl.arange(0, NREST)
    if PAIRS:
        return f, 2 * f, 2 * f + 1, rest
    else:  # noqa: RET505 - what follows a return under a constant condition is still compiled
        return f, f, F + f, rest


@triton.jit
def _begin(token, row, token_stride, head_stride, H: tl.constexpr):
    """Of each head. Heads may lie further apart than tokens: a long sequence of them fills 32 bits."""
    return token * token_stride + (row % H).to(tl.int64) * head_stride


@triton.jit
def _read(ptr, base, col, kept):
    return tl.load(ptr + base[:, None] + col[None, :], mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _turn(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, token_stride, head_stride, EPS: tl.constexpr,
    H: tl.constexpr, DIM: tl.constexpr, F: tl.constexpr, NF: tl.constexpr, REST: tl.constexpr, NREST: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    narrow: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    token = (row // H).to(tl.int64)
    base = _begin(token, row, token_stride, head_stride, H)
    f, one_col, two_col, rest_col = _columns(F, NF, NREST, PAIRS)
    turns = live[:, None] & (f < F)[None, :]
    stays = live[:, None] & (tl.arange(0, NREST) < REST)[None, :]
    one = _read(x_ptr, base, one_col, turns)
    two = _read(x_ptr, base, two_col, turns)
    if REST > 0:
        rest = _read(x_ptr, base, rest_col, stays)
    if NORM:
        square = tl.sum(one * one + two * two, 1)
        if REST > 0:
            square += tl.sum(rest * rest, 1)
            rest_weight = read_weight(weight_ptr, rest_col, tl.arange(0, NREST) < REST, narrow, CENTERED)
        rstd = tl.rsqrt(square / DIM + EPS)[:, None]
        one *= rstd * read_weight(weight_ptr, one_col, f < F, narrow, CENTERED)[None, :]
        two *= rstd * read_weight(weight_ptr, two_col, f < F, narrow, CENTERED)[None, :]
        if REST > 0:
            rest *= rstd * rest_weight[None, :]
    cos = _read(cos_ptr, token * F, f, turns)
    sin = _read(sin_ptr, token * F, f, turns)
    out = out_ptr + row.to(tl.int64)[:, None] * DIM
    tl.store(out + f[None, :], (one * cos - two * sin).to(narrow), mask=turns)
    tl.store(out + (F + f)[None, :], (two * cos + one * sin).to(narrow), mask=turns)
    if REST > 0:
        tl.store(out + rest_col[None, :], rest.to(narrow), mask=stays)


@triton.jit
def _turn_grad(
    grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, part_ptr, num_rows, grad_token_stride, grad_head_stride,
    token_stride, head_stride, EPS: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr, F: tl.constexpr, NF: tl.constexpr,
    REST: tl.constexpr, NREST: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    NORM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    narrow: tl.constexpr = out_ptr.dtype.element_ty
    f, one_col, two_col, rest_col = _columns(F, NF, NREST, PAIRS)
    some = tl.arange(0, NREST) < REST
    if NORM:
        one_weight = read_weight(weight_ptr, one_col, f < F, narrow, CENTERED)[None, :]
        two_weight = read_weight(weight_ptr, two_col, f < F, narrow, CENTERED)[None, :]
        rest_weight = read_weight(weight_ptr, rest_col, some, narrow, CENTERED)[None, :]
    # Parts of the weight's gradient, row by row of the tile until the end: a sum each time would cost more.
    one_part = tl.zeros((ROWS, NF), tl.float32)
    two_part = tl.zeros((ROWS, NF), tl.float32)
    rest_part = tl.zeros((ROWS, NREST), tl.float32)
    for first_row in tl.range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first_row + tl.arange(0, ROWS)
        live = row < num_rows
        token = (row // H).to(tl.int64)
        base = _begin(token, row, grad_token_stride, grad_head_stride, H)
        turns = live[:, None] & (f < F)[None, :]
        stays = live[:, None] & some[None, :]
        left = _read(grad_ptr, base, f, turns)
        right = _read(grad_ptr, base, F + f, turns)
        cos = _read(cos_ptr, token * F, f, turns)
        sin = _read(sin_ptr, token * F, f, turns)
        one_grad = left * cos + right * sin
        two_grad = right * cos - left * sin
        if REST > 0:
            rest_grad = _read(grad_ptr, base, rest_col, stays)
        if NORM:
            base = _begin(token, row, token_stride, head_stride, H)
            one = _read(x_ptr, base, one_col, turns)
            two = _read(x_ptr, base, two_col, turns)
            square = tl.sum(one * one + two * two, 1)
            slope = tl.sum(one_grad * one_weight * one + two_grad * two_weight * two, 1)
            if REST > 0:
                rest = _read(x_ptr, base, rest_col, stays)
                square += tl.sum(rest * rest, 1)
                slope += tl.sum(rest_grad * rest_weight * rest, 1)
            rstd = tl.rsqrt(square / DIM + EPS)
            slope = (slope * rstd * rstd / DIM)[:, None]
            rstd = rstd[:, None]
            one_part += one_grad * one * rstd
            two_part += two_grad * two * rstd
            one_grad = (one_grad * one_weight - one * slope) * rstd
            two_grad = (two_grad * two_weight - two * slope) * rstd
            if REST > 0:
                rest_part += rest_grad * rest * rstd
                rest_grad = (rest_grad * rest_weight - rest * slope) * rstd
        out = out_ptr + row.to(tl.int64)[:, None] * DIM
        tl.store(out + one_col[None, :], one_grad.to(narrow), mask=turns)
        tl.store(out + two_col[None, :], two_grad.to(narrow), mask=turns)
        if REST > 0:
            tl.store(out + rest_col[None, :], rest_grad.to(narrow), mask=stays)
    if NORM:
        part = part_ptr + tl.program_id(0) * DIM
        tl.store(part + one_col, tl.sum(one_part, 0), mask=f < F)
        tl.store(part + two_col, tl.sum(two_part, 0), mask=f < F)
        if REST > 0:
            tl.store(part + rest_col, tl.sum(rest_part, 0), mask=some)
