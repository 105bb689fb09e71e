"""The gated delta rule over a sequence that is spread over ranks: by trading sequence for heads, or by passing states.

The rule is affine in the state it starts from. A rank works out what each of its spans makes of any state (what it
adds, and the k x k it multiplies by), these are gathered, and from them the state before each span follows.

Shapes: B batch, s this rank's share of the sequence, S the whole, K key heads, H value heads, k key dim, v value dim,
W channels of the convolution, P spans of all ranks, X and Y columns of a key head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.attention.chunked import chunk_up
from threefold.engine.attention.delta import GatedDelta, Share, runs, short_conv
from threefold.engine.mesh import Group
from threefold.engine.shard.collectives import gather
from threefold.engine.shard.zigzag import spans_of, to_natural, trade_for_heads, trade_for_sequence


@dataclass(frozen=True)
class DeltaContext:
    """`a2a` trades where the key heads divide; everything else passes states."""

    kind: str
    group: Group

    def __call__(self, layer: GatedDelta, qkv_BsKX: Tensor, ba_BsKY: Tensor, documents_BS: Tensor | None) -> Tensor:
        if self.kind == "a2a" and qkv_BsKX.shape[2] % self.group.size == 0:
            return self._trade(layer, qkv_BsKX, ba_BsKY, documents_BS)
        return self._pass_states(layer, qkv_BsKX, ba_BsKY, documents_BS)

    def _trade(self, layer: GatedDelta, qkv: Tensor, ba: Tensor, documents_BS: Tensor | None) -> Tensor:
        qkv, ba = trade_for_heads([qkv, ba], self.group)
        share = layer.share(self.group.rank, self.group.size)
        return trade_for_sequence(layer.mix(qkv, ba, documents_BS, share), self.group)

    def _pass_states(self, layer: GatedDelta, qkv: Tensor, ba: Tensor, documents_BS: Tensor | None) -> Tensor:
        spans = spans_of(qkv.shape[1] * self.group.size, self.group.size, self.group.rank)
        sizes = [len(span) for span in spans]
        mixed_BsW = layer.channels(qkv)
        convolved = self._convolve(mixed_BsW.split(sizes, dim=1), spans, layer.conv, documents_BS)
        g_BsH, beta_BsH = Share(layer.conv, layer.dt_bias, layer.a_log).gates(ba)
        gates = zip(g_BsH.split(sizes, dim=1), beta_BsH.split(sizes, dim=1), strict=True)
        run_BS = None if documents_BS is None else runs(documents_BS)
        chunked = [
            chunk_up(*layer.heads(mixed), g, beta, *_runs_of(span, run_BS))
            for mixed, span, (g, beta) in zip(convolved, spans, gates, strict=True)
        ]
        states = self._states(torch.stack([part.effect() for part in chunked]), spans)
        return torch.cat([part.output(state) for part, state in zip(chunked, states, strict=True)], dim=1)

    def _convolve(
        self, mixed: Sequence[Tensor], spans: Sequence[range], weight_WT: Tensor, documents_BS: Tensor | None
    ) -> list[Tensor]:
        """Each span behind the few tokens before it, which are the ends of the spans before."""
        tail = min(weight_WT.shape[1] - 1, len(spans[0]))
        ends_BTW = torch.cat([part[:, part.shape[1] - tail :] for part in mixed], dim=1)
        ends_BTW = to_natural(gather(ends_BTW, self.group, dim=1), self.group.size, 1)
        convolved = []
        for part, span in zip(mixed, spans, strict=True):
            until = span.start // len(span) * tail
            needed = min(weight_WT.shape[1] - 1, until)
            longer = torch.cat([ends_BTW[:, until - needed : until], part], dim=1)
            documents = None if documents_BS is None else documents_BS[:, span.start - needed : span.stop]
            convolved.append(F.silu(short_conv(longer, weight_WT, documents)[:, needed:]))
        return convolved

    def _states(self, effect_PBHkx: Tensor, spans: Sequence[range]) -> list[Tensor]:
        """The state before each of this rank's spans."""
        all_PBHkx = to_natural(gather(effect_PBHkx, self.group), self.group.size, 0)
        keys = all_PBHkx.shape[-2]
        wanted = [span.start // len(span) for span in spans]
        state = torch.zeros_like(all_PBHkx[0, ..., :-keys])
        states = {0: state}
        for place in range(max(wanted)):
            added, factor = all_PBHkx[place].split([state.shape[-1], keys], dim=-1)
            state = factor @ state + added
            states[place + 1] = state
        return [states[place] for place in wanted]


def _runs_of(span: range, run_BS: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Numbers of the documents in a span, and of the token before it."""
    if run_BS is None:
        return None, None
    return run_BS[:, span.start : span.stop], run_BS[:, span.start - 1] if span.start else None
