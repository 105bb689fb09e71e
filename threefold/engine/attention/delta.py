"""The gated delta rule (Qwen3-Next): a decaying state per value head that each token corrects.

Per head, with state S (k x v): S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q.

Shapes: B batch, S sequence, D model dim, K key heads, H value heads, k key dim, v value dim,
N chunks, C tokens of a chunk, W channels of the convolution.
"""

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.norm import GatedRMSNorm, wide
from threefold.engine.places import Places, bounds_of, starts
from threefold.spec.model import DeltaSpec

CHUNK = 64  # tokens; as flash-linear-attention and transformers choose it


class GatedDelta(nn.Module):
    def __init__(self, spec: DeltaSpec, dim: int, eps: float) -> None:
        super().__init__()
        self.spec = spec
        # Both projections are ordered by key head, so that a tensor-parallel split keeps heads whole.
        self.qkvz = nn.Linear(dim, 2 * spec.keys + 2 * spec.values, bias=False)
        self.ba = nn.Linear(dim, 2 * spec.num_v_heads, bias=False)
        self.conv = nn.Parameter(torch.empty(2 * spec.keys + spec.values, spec.conv))
        self.dt_bias = nn.Parameter(torch.ones(spec.num_v_heads))
        self.a_log = nn.Parameter(torch.zeros(spec.num_v_heads))
        self.norm = GatedRMSNorm(spec.v_dim, eps)
        self.out = nn.Linear(spec.values, dim, bias=False)

    def forward(self, x_BSD: Tensor, places: Places) -> Tensor:
        q_BSHk, k_BSHk, v_BSHv, z_BSHv, g_BSH, beta_BSH = self.project(x_BSD, places.documents_BS)
        rule = _fused_rule if x_BSD.is_cuda and _has_fused_rule() else delta_rule
        out_BSHv = rule(q_BSHk, k_BSHk, v_BSHv, g_BSH, beta_BSH, places.documents_BS)
        return self.out(self.norm(out_BSHv, z_BSHv).flatten(2))

    def project(self, x_BSD: Tensor, documents_BS: Tensor | None) -> tuple[Tensor, ...]:
        """q, k, v behind the convolution, the output gate z, log decay g and step beta."""
        spec = self.spec
        each = spec.num_v_heads // spec.num_k_heads
        qkvz = self.qkvz(x_BSD).unflatten(-1, (spec.num_k_heads, -1))
        q, k, v, z = qkvz.split([spec.k_dim, spec.k_dim, each * spec.v_dim, each * spec.v_dim], dim=-1)
        b, a = self.ba(x_BSD).unflatten(-1, (spec.num_k_heads, -1)).chunk(2, dim=-1)
        mixed_BSW = torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1)
        mixed_BSW = F.silu(short_conv(mixed_BSW, self.conv, documents_BS))
        q, k, v = mixed_BSW.split([spec.keys, spec.keys, spec.values], dim=-1)
        q, k = (part.unflatten(-1, (-1, spec.k_dim)).repeat_interleave(each, dim=2) for part in (q, k))
        v, z = v.unflatten(-1, (-1, spec.v_dim)), z.reshape(*z.shape[:2], -1, spec.v_dim)
        a_BSH = a.flatten(2).to(wide(a.dtype))
        g_BSH = -self.a_log.to(a_BSH.dtype).exp() * F.softplus(a_BSH + self.dt_bias.to(a_BSH.dtype))
        return q, k, v, z, g_BSH, b.flatten(2).sigmoid()


def short_conv(x_BSW: Tensor, weight_WT: Tensor, documents_BS: Tensor | None) -> Tensor:
    """Causal convolution per channel over the last few tokens of the document; the last tap is the token itself."""
    taps = weight_WT.shape[1]
    if documents_BS is None:
        x_BWS = F.pad(x_BSW.transpose(1, 2), (taps - 1, 0))
        return F.conv1d(x_BWS, weight_WT[:, None], groups=x_BSW.shape[2]).transpose(1, 2)
    run_BS = starts(documents_BS).cumsum(dim=1)
    out_BSW = x_BSW * weight_WT[:, -1]
    for back in range(1, min(taps, x_BSW.shape[1])):
        same_BS1 = (run_BS[:, back:] == run_BS[:, :-back])[..., None]
        term = x_BSW[:, :-back] * weight_WT[:, -1 - back] * same_BS1
        out_BSW = out_BSW + F.pad(term, (0, 0, back, 0))
    return out_BSW


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)  # 1e-6: as flash-linear-attention


def delta_rule_by_token(
    q_BSHk: Tensor, k_BSHk: Tensor, v_BSHv: Tensor, g_BSH: Tensor, beta_BSH: Tensor, documents_BS: Tensor | None = None
) -> Tensor:
    """The definition, one token after the other: the oracle of `delta_rule`."""
    dtype = wide(q_BSHk.dtype)
    q, k, v, g, beta = (x.to(dtype) for x in (q_BSHk, k_BSHk, v_BSHv, g_BSH, beta_BSH))
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    state_BHkv = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1])
    outs = []
    for t in range(q.shape[1]):
        keep = g[:, t].exp()
        if documents_BS is not None and t:
            keep = keep * (documents_BS[:, t] == documents_BS[:, t - 1])[:, None]
        state_BHkv = state_BHkv * keep[..., None, None]
        known_BHv = torch.einsum("bhkv,bhk->bhv", state_BHkv, k[:, t])
        step_BHv = beta[:, t, :, None] * (v[:, t] - known_BHv)
        state_BHkv = state_BHkv + k[:, t, :, :, None] * step_BHv[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state_BHkv, q[:, t]))
    return torch.stack(outs, dim=1).to(q_BSHk.dtype)


def delta_rule(
    q_BSHk: Tensor,
    k_BSHk: Tensor,
    v_BSHv: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    documents_BS: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Chunk by chunk: matrix products inside, the state passed on between. State and sums in fp32 at least.

    A document's start resets the state. The decay there would be exp(-inf), and -inf - -inf is no number,
    so that what belongs to another document is masked instead.
    """
    dtype, length = wide(q_BSHk.dtype), q_BSHk.shape[1]
    run_BS = torch.zeros_like(q_BSHk[..., 0, 0], dtype=torch.long)
    if documents_BS is not None:
        run_BS = starts(documents_BS).cumsum(dim=1)
    q, k, v = (_chunks(x.to(dtype), chunk) for x in (q_BSHk, k_BSHk, v_BSHv))
    g_BHNC, beta_BHNC = (_chunks(x.to(dtype)[..., None], chunk)[..., 0] for x in (g_BSH, beta_BSH))
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)

    run_BNC = _chunks(run_BS[..., None, None], chunk, fill=-1)[:, 0, ..., 0]
    same, from_before, to_after, carry = _document_masks(run_BNC)
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

    q, k = q * fade_in[..., None], k * fade_out[..., None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outs = []
    for n in range(q.shape[2]):
        new = own[:, :, n] - read[:, :, n] @ state
        outs.append(q[:, :, n] @ state + inside[:, :, n] @ new)
        state = state * keep_BHN[:, :, n, None, None] + k[:, :, n].transpose(-1, -2) @ new
    out_BHSv = torch.stack(outs, dim=2).flatten(2, 3)[:, :, :length]
    return out_BHSv.transpose(1, 2).to(q_BSHk.dtype)


def _chunks(x_BSHd: Tensor, chunk: int, fill: int = 0) -> Tensor:
    """(B, S, H, d) as (B, H, N, C, d), filled up to whole chunks."""
    x_BHSd = x_BSHd.transpose(1, 2)
    padded = F.pad(x_BHSd, (0, 0, 0, -x_BHSd.shape[2] % chunk), value=fill)
    return padded.unflatten(2, (-1, chunk))


def _document_masks(run_BNC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs of a chunk in one document (causal), who reads the state handed in, who writes the one handed on,
    and whether a chunk passes the state on at all; with a dim for the heads."""
    causal = torch.ones(run_BNC.shape[-1], run_BNC.shape[-1], dtype=torch.bool, device=run_BNC.device).tril()
    same = (run_BNC[..., :, None] == run_BNC[..., None, :]) & causal
    last_BN = run_BNC[..., -1]
    before_BN = F.pad(last_BN[:, :-1], (1, 0), value=-2)
    from_before = run_BNC == before_BN[..., None]
    to_after = run_BNC == last_BN[..., None]
    return same[:, None], from_before[:, None], to_after[:, None], (last_BN == before_BN)[:, None]


@cache
def _has_fused_rule() -> bool:
    return find_spec("fla") is not None


def _fused_rule(
    q_BSHk: Tensor, k_BSHk: Tensor, v_BSHv: Tensor, g_BSH: Tensor, beta_BSH: Tensor, documents_BS: Tensor | None
) -> Tensor:
    """flash-linear-attention; documents of all rows lie one behind the other in one row."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    tensors = [q_BSHk, k_BSHk, v_BSHv, g_BSH, beta_BSH]
    edges = None
    if documents_BS is not None:
        edges = bounds_of(documents_BS).starts.long()
        tensors = [x.flatten(0, 1)[None] for x in tensors]
    q, k, v, g, beta = tensors
    out, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=edges)
    return out.view_as(v_BSHv)
