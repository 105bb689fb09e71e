"""Attention in blocks of queries, for heads wider than flash kernels take, against attention with every score."""

import pytest
import torch

from threefold.engine.attention.backend import reference
from threefold.engine.attention.wide_heads import BlockMask, attend_in_blocks

DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])


@pytest.mark.parametrize("block_bytes", [1, 1000, 2**28], ids=["rows", "blocks", "whole"])
@pytest.mark.parametrize(("window", "documents"), [(None, None), (3, None), (None, DOCUMENTS), (5, DOCUMENTS)])
@pytest.mark.parametrize("value_dim", [6, 4])
def test_blocks_are_whole_attention(
    block_bytes: int, window: int | None, documents: torch.Tensor | None, value_dim: int
) -> None:
    """fp64: sums in another order only. Six query heads share two key heads."""
    torch.manual_seed(0)
    shapes = ((2, 6, 11, 6), (2, 2, 11, 6), (2, 2, 11, value_dim))
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    out = attend_in_blocks(q, k, v, 0.7, BlockMask(window, documents), block_bytes)
    expected = reference(q, k, v, scale=0.7, window=window, documents_BS=documents)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for each, other in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        assert torch.allclose(each, other, rtol=1e-11, atol=1e-12)
