"""The gated delta rule in chunks: GEMMs inside a chunk, and a recurrence of the state from chunk to chunk.

`gated_delta.py` runs it on whole sequences. `shard/recurrent_context.py` runs it on spans of a sequence and passes
states between ranks. Chunks are in the WY form of flash-linear-attention, which also names `u` and `w`.

Shapes: B batch, S sequence, H value heads, k key dim, v value dim, N chunks, C tokens of a chunk.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.sum_dtype import fp32_or_wider

CHUNK = 64  # tokens; as flash-linear-attention and transformers choose it
EPS = 1e-6  # added to the squared length of queries and keys, as flash-linear-attention does


@dataclass(frozen=True)
class ChunkedDelta:
    """A span of tokens, prepared for the recurrence over its chunks.

    For each chunk: correction = u - w @ state, output = query @ state + scores @ correction, and the next state is
    decay * state + key^T @ correction. All of it is affine in the state.
    """

    query_BHNCk: Tensor  # queries, decayed from the start of the chunk
    key_BHNCk: Tensor  # keys, decayed to the end of the chunk
    u_BHNCv: Tensor
    w_BHNCk: Tensor
    scores_BHNCC: Tensor  # attention inside the chunk
    decay_BHN: Tensor  # of the state over the chunk; 0 where a document starts in it
    length: int  # tokens of the span, without padding
    dtype: torch.dtype  # of the output

    def output(self, state_BHkv: Tensor | None = None) -> Tensor:
        """The span's output, given the state before it."""
        state = self._zero_state(self.u_BHNCv.shape[-1]) if state_BHkv is None else state_BHkv
        outs = []
        for n in range(self.decay_BHN.shape[2]):
            correction = self.u_BHNCv[:, :, n] - self.w_BHNCk[:, :, n] @ state
            outs.append(self.query_BHNCk[:, :, n] @ state + self.scores_BHNCC[:, :, n] @ correction)
            state = self._next_state(n, state, correction)
        out_BHSv = torch.stack(outs, dim=2).flatten(2, 3)[:, :, : self.length]
        return out_BHSv.transpose(1, 2).to(self.dtype)

    def transition(self) -> Tensor:
        """The affine map from the state before the span to the state after it.

        (B, H, k, v + k): first the term (k x v) that it adds, then the factor (k x k) that it multiplies by.
        """
        values, keys = self.u_BHNCv.shape[-1], self.w_BHNCk.shape[-1]
        u = F.pad(self.u_BHNCv, (0, keys))
        identity_kk = torch.eye(keys, dtype=u.dtype, device=u.device).expand(*u.shape[:2], keys, keys)
        state = torch.cat([self._zero_state(values), identity_kk], dim=-1)
        for n in range(self.decay_BHN.shape[2]):
            state = self._next_state(n, state, u[:, :, n] - self.w_BHNCk[:, :, n] @ state)
        return state

    def _zero_state(self, values: int) -> Tensor:
        return self.u_BHNCv.new_zeros(*self.u_BHNCv.shape[:2], self.w_BHNCk.shape[-1], values)

    def _next_state(self, n: int, state: Tensor, correction: Tensor) -> Tensor:
        return state * self.decay_BHN[:, :, n, None, None] + self.key_BHNCk[:, :, n].transpose(-1, -2) @ correction


def chunk_delta_rule(
    q_BSHk: Tensor,
    k_BSHk: Tensor,
    v_BSHv: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    document_BS: Tensor | None = None,
    document_before_B: Tensor | None = None,
    chunk: int = CHUNK,
) -> ChunkedDelta:
    """Prepare a span. `document_BS` numbers the documents; `document_before_B` is the document before the span, if any.

    The start of a document resets the state. The decay there would be exp(-inf), and -inf - -inf is not a number, so
    tokens of other documents are masked instead.
    """
    dtype = fp32_or_wider(q_BSHk.dtype)
    q, k, v = (_split_chunks(x.to(dtype), chunk) for x in (q_BSHk, k_BSHk, v_BSHv))
    g_BHNC, beta_BHNC = (_split_chunks(x.to(dtype)[..., None], chunk)[..., 0] for x in (g_BSH, beta_BSH))
    q, k = l2_normalize(q) * q.shape[-1] ** -0.5, l2_normalize(k)

    if document_BS is None:
        document_BS = torch.zeros_like(q_BSHk[..., 0, 0], dtype=torch.long)
    # Padding of the last chunk neither decays nor writes, and counts as the last document, so that its state goes on.
    document_BS = torch.cat([document_BS, document_BS[:, -1:].expand(-1, -document_BS.shape[1] % chunk)], dim=1)
    document_BNC = document_BS.unflatten(1, (-1, chunk))
    same, same_as_before, same_as_last, carries_state = document_masks(document_BNC, document_before_B)
    cumulative_g = g_BHNC.cumsum(dim=-1)
    decay = (cumulative_g[..., :, None] - cumulative_g[..., None, :]).masked_fill(~same, float("-inf")).exp()
    read_decay = cumulative_g.exp() * same_as_before  # of the incoming state, up to each token
    write_decay = (cumulative_g[..., -1:] - cumulative_g).exp() * same_as_last  # of each token, up to the end
    decay_BHN = cumulative_g[..., -1].exp() * carries_state

    # Within a chunk the correction of each token depends on those before it: a unit triangular system.
    system = (k * beta_BHNC[..., None]) @ k.transpose(-1, -2) * decay
    right = torch.cat([v, k * read_decay[..., None]], dim=-1) * beta_BHNC[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = q @ k.transpose(-1, -2) * decay
    decayed_q, decayed_k = q * read_decay[..., None], k * write_decay[..., None]
    return ChunkedDelta(decayed_q, decayed_k, u, w, scores, decay_BHN, q_BSHk.shape[1], q_BSHk.dtype)


def l2_normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + EPS)


def _split_chunks(x_BSHd: Tensor, chunk: int) -> Tensor:
    """(B, S, H, d) as (B, H, N, C, d), padded to whole chunks."""
    x_BHSd = x_BSHd.transpose(1, 2)
    return F.pad(x_BHSd, (0, 0, 0, -x_BHSd.shape[2] % chunk)).unflatten(2, (-1, chunk))


def document_masks(document_BNC: Tensor, document_before_B: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four masks, each with a dim for the heads.

    Pairs of tokens of a chunk in one document (causal); tokens that read the incoming state; tokens that write to the
    outgoing state; and chunks that pass the incoming state on.
    """
    size = document_BNC.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=document_BNC.device).tril()
    same = (document_BNC[..., :, None] == document_BNC[..., None, :]) & causal
    last_BN = document_BNC[..., -1]
    # With nothing before the span the state is zero, so the first document may read it.
    first_B = document_BNC[:, 0, 0] if document_before_B is None else document_before_B
    before_BN = torch.cat([first_B[:, None], last_BN[:, :-1]], dim=1)
    same_as_before = document_BNC == before_BN[..., None]
    same_as_last = document_BNC == last_BN[..., None]
    return same[:, None], same_as_before[:, None], same_as_last[:, None], (last_BN == before_BN)[:, None]
