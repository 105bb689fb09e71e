"""How a tile of results leaves the registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore


@triton.jit
def halves(acc, BM: tl.constexpr, BN: tl.constexpr):
    """Left and right columns, so that what follows needs half the registers."""
    return acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()


@triton.jit
def store(
    value, desc, ptr, first, end, col, shift, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, COPY: tl.constexpr = True,
):  # fmt: skip
    """Rows from `first` up to `end`, columns from `col` up to WIDTH, all `shift` further right."""
    if EVEN and COPY and first + BM <= end:
        desc.store([first, shift + col], value)
    else:
        # The copy engine cannot be told to spare the next expert's rows, or the next half's columns.
        row, n = first + tl.arange(0, BM), col + tl.arange(0, BN)
        kept = (row < end)[:, None] & (n < WIDTH)[None, :]
        tl.store(ptr + row.to(tl.int64)[:, None] * STRIDE + shift + n[None, :], value, mask=kept)
