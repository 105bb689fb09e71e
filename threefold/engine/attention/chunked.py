"""The gated delta rule chunk by chunk: matrix products inside a chunk, the state handed on between.

Shapes: B batch, S sequence, H value heads, k key dim, v value dim, N chunks, C tokens of a chunk.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.norm import wide

CHUNK = 64  # tokens; as flash-linear-attention and transformers choose it


@dataclass(frozen=True)
class Chunked:
    """A span of tokens as the recurrence over its chunks needs it.

    A chunk reads `reads @ state` out of the state handed in, corrects it by new = own - read @ state, and hands on
    keep * state + writes^T @ new: all affine in the state.
    """

    reads_BHNCk: Tensor
    writes_BHNCk: Tensor
    own_BHNCv: Tensor
    read_BHNCk: Tensor
    inside_BHNCC: Tensor
    keep_BHN: Tensor
    length: int
    dtype: torch.dtype

    def output(self, state_BHkv: Tensor | None = None) -> Tensor:
        """The span's output, given the state before it."""
        state = self._empty(self.own_BHNCv.shape[-1]) if state_BHkv is None else state_BHkv
        outs = []
        for n in range(self.keep_BHN.shape[2]):
            new = self.own_BHNCv[:, :, n] - self.read_BHNCk[:, :, n] @ state
            outs.append(self.reads_BHNCk[:, :, n] @ state + self.inside_BHNCC[:, :, n] @ new)
            state = self._hand_on(n, state, new)
        out_BHSv = torch.stack(outs, dim=2).flatten(2, 3)[:, :, : self.length]
        return out_BHSv.transpose(1, 2).to(self.dtype)

    def effect(self) -> Tensor:
        """What the span makes of a state: (B, H, k, v + k), first what it adds, then the k x k it multiplies by."""
        values, keys = self.own_BHNCv.shape[-1], self.read_BHNCk.shape[-1]
        own = F.pad(self.own_BHNCv, (0, keys))
        unit = torch.eye(keys, dtype=own.dtype, device=own.device).expand(*own.shape[:2], keys, keys)
        state = torch.cat([self._empty(values), unit], dim=-1)
        for n in range(self.keep_BHN.shape[2]):
            state = self._hand_on(n, state, own[:, :, n] - self.read_BHNCk[:, :, n] @ state)
        return state

    def _empty(self, values: int) -> Tensor:
        return self.own_BHNCv.new_zeros(*self.own_BHNCv.shape[:2], self.read_BHNCk.shape[-1], values)

    def _hand_on(self, n: int, state: Tensor, new: Tensor) -> Tensor:
        return state * self.keep_BHN[:, :, n, None, None] + self.writes_BHNCk[:, :, n].transpose(-1, -2) @ new


def chunk_up(
    q_BSHk: Tensor,
    k_BSHk: Tensor,
    v_BSHv: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    run_BS: Tensor | None = None,
    before_B: Tensor | None = None,
    chunk: int = CHUNK,
) -> Chunked:
    """`run_BS` numbers the documents, `before_B` is the number of the token before the span, where there is one.

    A document's start resets the state. The decay there would be exp(-inf), and -inf - -inf is no number,
    so that what belongs to another document is masked instead.
    """
    dtype = wide(q_BSHk.dtype)
    q, k, v = (_chunks(x.to(dtype), chunk) for x in (q_BSHk, k_BSHk, v_BSHv))
    g_BHNC, beta_BHNC = (_chunks(x.to(dtype)[..., None], chunk)[..., 0] for x in (g_BSH, beta_BSH))
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)

    if run_BS is None:
        run_BS = torch.zeros_like(q_BSHk[..., 0, 0], dtype=torch.long)
    # What fills up the last chunk neither decays nor writes, and belongs to the last document, which it hands on.
    run_BS = torch.cat([run_BS, run_BS[:, -1:].expand(-1, -run_BS.shape[1] % chunk)], dim=1)
    same, from_before, to_after, carry = _document_masks(run_BS.unflatten(1, (-1, chunk)), before_B)
    passed = g_BHNC.cumsum(dim=-1)
    decay = (passed[..., :, None] - passed[..., None, :]).masked_fill(~same, float("-inf")).exp()
    fade_in = passed.exp() * from_before  # of the state handed in, as each token reads it
    fade_out = (passed[..., -1:] - passed).exp() * to_after  # of each token, in the state handed on
    keep_BHN = passed[..., -1].exp() * carry

    # Within a chunk each token's correction depends on the ones before it: a unit triangular system.
    system = (k * beta_BHNC[..., None]) @ k.transpose(-1, -2) * decay
    right = torch.cat([v, k * fade_in[..., None]], dim=-1) * beta_BHNC[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inside = q @ k.transpose(-1, -2) * decay
    reads, writes = q * fade_in[..., None], k * fade_out[..., None]
    return Chunked(reads, writes, own, read, inside, keep_BHN, q_BSHk.shape[1], q_BSHk.dtype)


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)  # 1e-6: as flash-linear-attention


def _chunks(x_BSHd: Tensor, chunk: int) -> Tensor:
    """(B, S, H, d) as (B, H, N, C, d), filled up to whole chunks."""
    x_BHSd = x_BSHd.transpose(1, 2)
    return F.pad(x_BHSd, (0, 0, 0, -x_BHSd.shape[2] % chunk)).unflatten(2, (-1, chunk))


def _document_masks(run_BNC: Tensor, before_B: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs of a chunk in one document (causal), who reads the state handed in, who writes the one handed on,
    and whether a chunk passes the state on at all; with a dim for the heads."""
    causal = torch.ones(run_BNC.shape[-1], run_BNC.shape[-1], dtype=torch.bool, device=run_BNC.device).tril()
    same = (run_BNC[..., :, None] == run_BNC[..., None, :]) & causal
    last_BN = run_BNC[..., -1]
    first_B = run_BNC[:, 0, 0] if before_B is None else before_B  # with nothing before it the state is zero
    before_BN = torch.cat([first_B[:, None], last_BN[:, :-1]], dim=1)
    from_before = run_BNC == before_BN[..., None]
    to_after = run_BNC == last_BN[..., None]
    return same[:, None], from_before[:, None], to_after[:, None], (last_BN == before_BN)[:, None]
