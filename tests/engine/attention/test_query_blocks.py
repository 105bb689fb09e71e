"""Attention in blocks of queries, for what no fused kernel takes, against attention with every score."""

from functools import partial

import pytest
import torch
from attention_reference import reference

from threefold.engine.attention.query_blocks import CausalMask, attend_in_blocks

DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])


@pytest.mark.parametrize("block_bytes", [1, 1000, 2**28], ids=["rows", "blocks", "whole"])
@pytest.mark.parametrize(("window", "documents"), [(None, None), (3, None), (None, DOCUMENTS), (5, DOCUMENTS)])
@pytest.mark.parametrize(("value_dim", "has_sinks"), [(6, False), (4, False), (6, True)])
def test_blocks_are_whole_attention(
    block_bytes: int, window: int | None, documents: torch.Tensor | None, value_dim: int, has_sinks: bool
) -> None:
    """fp64: sums in another order only. Six query heads share two key heads."""
    torch.manual_seed(0)
    shapes = ((2, 6, 11, 6), (2, 2, 11, 6), (2, 2, 11, value_dim))
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    sinks = torch.randn(6, dtype=torch.float64, requires_grad=True) if has_sinks else None
    asked = {"sinks": sinks, "max_block_bytes": block_bytes}
    out = attend_in_blocks(q, k, v, 0.7, partial(CausalMask, window), documents, **asked)
    expected = reference(q, k, v, scale=0.7, window=window, sinks=sinks, documents_BS=documents)
    leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(out, leaves, grad)
    for each, other in zip(found, torch.autograd.grad(expected, leaves, grad), strict=True):
        assert torch.allclose(each, other, rtol=1e-11, atol=1e-12)
