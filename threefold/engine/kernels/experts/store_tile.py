"""Triton functions that split a tile of results and store it without touching the rows of the next expert.

The GEMM kernels of this folder and `fp8/grouped_gemm.py` call them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore


@triton.jit
def split_columns(acc, BM: tl.constexpr, BN: tl.constexpr):
    """-> (left columns, right columns). Whatever follows needs half the registers then."""
    return acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()


@triton.jit
def store_tile(
    value, desc, ptr, first, end, col, shift, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EVEN: tl.constexpr, COPY: tl.constexpr = True, target_ptr=None,
):  # fmt: skip
    """Store rows from `first` up to `end` and columns from `col` up to WIDTH, `shift` columns further right.

    COPY permits the copy engine (TMA), which is used for tiles that are full. With `target_ptr` a row is stored at the
    row that it names there.
    """
    if target_ptr is not None:
        row, n = first + tl.arange(0, BM), col + tl.arange(0, BN)
        target = tl.load(target_ptr + row, mask=row < end, other=0).to(tl.int64)
        mask = (row < end)[:, None] & (n < WIDTH)[None, :]
        tl.store(ptr + target[:, None] * STRIDE + shift + n[None, :], value, mask=mask)
    elif EVEN and COPY and first + BM <= end:
        desc.store([first, shift + col], value)
    else:
        # The copy engine stores whole tiles: it would overwrite the next expert's rows or the next half's columns.
        row, n = first + tl.arange(0, BM), col + tl.arange(0, BN)
        mask = (row < end)[:, None] & (n < WIDTH)[None, :]
        tl.store(ptr + row.to(tl.int64)[:, None] * STRIDE + shift + n[None, :], value, mask=mask)
