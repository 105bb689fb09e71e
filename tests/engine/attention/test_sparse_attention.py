"""Attention to the keys that an indexer chose, against plain torch. Parity with transformers: `test_models.py`.

Shapes: B batch, H heads, S sequence, d head dim, v value dim, K chosen keys.
"""

import pytest
import torch
from tiny_models import spec_of
from torch import Tensor

from threefold.engine.attention.query_blocks import attend_in_blocks
from threefold.engine.attention.sparse.chosen_keys import ChosenKeys
from threefold.engine.attention.sparse.indexer import visible_keys
from threefold.engine.attention.sparse.sparse_mla import SparseMlaAttention
from threefold.engine.models.build import build_model
from threefold.findings import FindingsError

B, H, S, D, V, K = 2, 3, 19, 6, 5, 4
DOCUMENTS = torch.tensor([[0] * 8 + [1] * 11, [2] * 19])


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [1, 4, 19], ids=lambda rows: f"{rows} rows a block")
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "packed"])
def test_chosen_keys_equal_a_mask(documents: Tensor | None, rows: int) -> None:
    q, k, v = drawn(B, H, S, D), drawn(B, H, S, D) + 0.1, drawn(B, H, S, V)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    visible = visible_keys(slice(0, S), S, documents, q.device)
    scores = drawn(B, S, S).masked_fill(~visible, float("-inf"))
    chosen = scores.topk(K, dim=-1).indices.to(torch.int32)
    mask = torch.zeros(B, S, S, dtype=torch.bool).scatter(-1, chosen.long(), True) & visible
    weights = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~mask[:, None], float("-inf")).softmax(dim=-1)
    expected = weights @ v
    block_bytes = 4 * B * H * S * rows
    found = attend_in_blocks(q, k, v, 0.3, ChosenKeys, chosen, documents, max_block_bytes=block_bytes)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grad = drawn(B, H, S, V) + 1
    for one, other in zip(
        torch.autograd.grad(found, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    assert (mask.sum(dim=-1) <= K).all()


def test_an_indexer_does_not_train() -> None:
    model = build_model(spec_of("deepseek_v32"))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert len(frozen) == 5 * len(model.layers)
    assert all(".indexer." in name for name in frozen)
    assert all(isinstance(block.mixer, SparseMlaAttention) for block in model.blocks())


def test_layers_that_reuse_a_choice_are_a_finding() -> None:
    """GLM's `indexer_types`: a layer without an indexer reads what one before it chose."""
    for reused in ({"indexer_types": ["full", "shared"]}, {"index_topk_pattern": "FS"}, {"index_topk_freq": 2}):
        with pytest.raises(FindingsError, match="indexer of another layer"):
            build_model(spec_of("glm_moe_dsa", **reused), device="meta")
    build_model(spec_of("glm_moe_dsa", indexer_types=["full", "full"]), device="meta")
