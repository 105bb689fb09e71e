"""The lightning indexer of sparse attention: a small scorer that chooses the keys which a query reads.

A query's score of a key is the sum over the indexer's heads of weight * relu(q k). The choice has no gradient, and a
loss on the scores is not defined by transformers, so that the weights of an indexer do not train: they are read, kept
and written. `sparse_mla.py` calls it.

Shapes: B batch, S sequence, T keys, D model dim, X latent of queries, I heads of the indexer, d head dim, C queries of
a block, K chosen keys.
"""

import torch
from torch import Tensor, nn

from threefold.engine.attention.query_blocks import query_blocks
from threefold.engine.layers.positions import document_starts
from threefold.engine.layers.rope import rotate
from threefold.engine.sum_dtype import fp32_or_wider
from threefold.spec.model import MlaSpec

MAX_SCORE_BYTES = 2**28  # scores of all heads of an indexer for one block of queries
EPS = 1e-6  # of the norm of keys, in DeepSeek's code and transformers'


class Indexer(nn.Module):
    def __init__(self, spec: MlaSpec, dim: int) -> None:
        super().__init__()
        index = spec.indexer
        assert index is not None
        assert spec.q_rank is not None
        self.spec, self.index = spec, index
        self.q = nn.Linear(spec.q_rank, index.num_heads * index.head_dim, bias=False)
        self.k = nn.Linear(dim, index.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(index.head_dim, eps=EPS)
        self.weight = nn.Linear(dim, index.num_heads, bias=False)
        self.requires_grad_(False)

    @torch.no_grad()
    def read_tokens(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The keys (B, S, d), not rotated yet, and the weights of the heads (B, S, I), of these tokens."""
        return self.k_norm(self.k(x_BSD)), self.weight(x_BSD)

    @torch.no_grad()
    def rotate_heads(self, heads_BHSd: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """The first dims of each head turn, unlike those of the attention itself, of which the last ones do."""
        rope = self.spec.rope_dim
        turned, rest = heads_BHSd.split([rope, heads_BHSd.shape[-1] - rope], dim=-1)
        return torch.cat([rotate(turned, table, self.index.rope_pairs), rest], dim=-1)

    @torch.no_grad()
    def queries(self, q_BSX: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """(B, I, S, d), from the latents of queries."""
        q_BISd = self.q(q_BSX).unflatten(-1, (-1, self.index.head_dim)).transpose(1, 2)
        return self.rotate_heads(q_BISd, table)

    @torch.no_grad()
    def scores(self, q_BICd: Tensor, k_BTd: Tensor, weight_BCI: Tensor) -> Tensor:
        """The score of each key for each query, (B, C, T), in fp32 at least."""
        dtype = fp32_or_wider(q_BICd.dtype)
        dots_BICT = (q_BICd.to(dtype) @ k_BTd.to(dtype)[:, None].transpose(-1, -2)).mul_(self.index.head_dim**-0.5)
        weight_BCI = weight_BCI.to(dtype) * self.index.num_heads**-0.5
        return torch.einsum("bict,bci->bct", dots_BICT.relu_(), weight_BCI)

    @torch.no_grad()
    def choose(
        self,
        q_BSX: Tensor,
        k_BSd: Tensor,
        weight_BSI: Tensor,
        table: tuple[Tensor, Tensor],
        documents_BS: Tensor | None,
    ) -> Tensor:
        """The positions of the chosen keys of every query, (B, S, K), int32. A query with fewer keys before it than K
        also gets some that it must not see: a causal mask is applied as well."""
        length = k_BSd.shape[1]
        q_BISd = self.queries(q_BSX, table)
        k_BSd = self.rotate_heads(k_BSd[:, None], table)[:, 0]
        row_bytes = 4 * len(k_BSd) * self.index.num_heads * length
        num_chosen = min(self.index.top_k, length)
        chosen_BSK = torch.empty(*k_BSd.shape[:2], num_chosen, dtype=torch.int32, device=k_BSd.device)
        for block in query_blocks(q_BISd, row_bytes, MAX_SCORE_BYTES):
            scores_BCT = self.scores(q_BISd[:, :, block], k_BSd, weight_BSI[:, block])
            visible_BCT = visible_keys(block, length, documents_BS, k_BSd.device)
            scores_BCT = scores_BCT.masked_fill(~visible_BCT, float("-inf"))
            chosen_BSK[:, block] = scores_BCT.topk(num_chosen, dim=-1).indices
        return chosen_BSK


def visible_keys(queries: slice, length: int, documents_BS: Tensor | None, device: torch.device) -> Tensor:
    """Which keys a block of queries may see: those before them and of their document. (B or 1, C, T)."""
    position_T = torch.arange(length, device=device)
    causal_1CT = (position_T <= position_T[queries, None])[None]
    if documents_BS is None:
        return causal_1CT
    number_BT = document_starts(documents_BS).cumsum(dim=1)
    return causal_1CT & (number_BT[:, None] == number_BT[:, queries, None])
