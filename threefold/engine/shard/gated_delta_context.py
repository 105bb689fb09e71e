"""Context parallelism for the gated delta rule: exchange sequence for heads, or pass states between spans.

The rule is affine in the state it starts from: state_after = factor @ state_before + added. Each rank computes factor
(k x k) and added (k x v) of its spans, all ranks gather them, and each derives the states before its own spans.
`context_parallel.py` sets `ContextParallelDelta` as a layer's `mix_over_ranks`.

Shapes: B batch, s this rank's shard of the sequence, S the whole, K key heads, H value heads, k key dim, v value dim,
W channels of the convolution, P spans of all ranks, X and Y columns of a key head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.attention.delta_chunks import chunk_delta_rule
from threefold.engine.attention.gated_delta import GatedDelta, HeadWeights, document_numbers, short_conv
from threefold.engine.dist.collectives import gather_along
from threefold.engine.dist.mesh import Group
from threefold.engine.shard.sequence_layout import heads_to_sequence, rank_spans, sequence_to_heads, undo_zigzag


@dataclass(frozen=True)
class ContextParallelDelta:
    """`a2a` exchanges heads where the key heads divide by cp; every other `cp_comm` passes states."""

    cp_comm: str
    group: Group

    def __call__(self, layer: GatedDelta, qkv_BsKX: Tensor, ba_BsKY: Tensor, documents_BS: Tensor | None) -> Tensor:
        if self.cp_comm == "a2a" and qkv_BsKX.shape[2] % self.group.size == 0:
            return self._exchange_heads(layer, qkv_BsKX, ba_BsKY, documents_BS)
        return self._pass_states(layer, qkv_BsKX, ba_BsKY, documents_BS)

    def _exchange_heads(self, layer: GatedDelta, qkv: Tensor, ba: Tensor, documents_BS: Tensor | None) -> Tensor:
        qkv, ba = sequence_to_heads([qkv, ba], self.group)
        head_weights = layer.head_weights(self.group.rank, self.group.size)
        return heads_to_sequence(layer.mix(qkv, ba, documents_BS, head_weights), self.group)

    def _pass_states(self, layer: GatedDelta, qkv: Tensor, ba: Tensor, documents_BS: Tensor | None) -> Tensor:
        spans = rank_spans(qkv.shape[1] * self.group.size, self.group.size, self.group.rank)
        sizes = [len(span) for span in spans]
        mixed_BsW = layer.channels(qkv)
        convolved = convolve_spans(mixed_BsW.split(sizes, dim=1), spans, layer.conv, documents_BS, self.group)
        g_BsH, beta_BsH = HeadWeights(layer.conv, layer.dt_bias, layer.a_log).gates(ba)
        gates = zip(g_BsH.split(sizes, dim=1), beta_BsH.split(sizes, dim=1), strict=True)
        document_BS = None if documents_BS is None else document_numbers(documents_BS)
        parts = [
            chunk_delta_rule(*layer.heads(F.silu(mixed)), g, beta, *span_documents(span, document_BS))
            for mixed, span, (g, beta) in zip(convolved, spans, gates, strict=True)
        ]
        states = self._initial_states(torch.stack([part.transition() for part in parts]), spans)
        return torch.cat([part.output(state) for part, state in zip(parts, states, strict=True)], dim=1)

    def _initial_states(self, effect_PBHkx: Tensor, spans: Sequence[range]) -> list[Tensor]:
        """The state before each of this rank's spans."""
        all_PBHkx = undo_zigzag(gather_along(effect_PBHkx, self.group), self.group.size, 0)
        keys = all_PBHkx.shape[-2]
        wanted = [span.start // len(span) for span in spans]
        state = torch.zeros_like(all_PBHkx[0, ..., :-keys])
        states = {0: state}
        for number in range(max(wanted)):
            added, factor = all_PBHkx[number].split([state.shape[-1], keys], dim=-1)
            state = factor @ state + added
            states[number + 1] = state
        return [states[number] for number in wanted]


def convolve_spans(
    mixed: Sequence[Tensor], spans: Sequence[range], weight_WT: Tensor, documents_BS: Tensor | None, group: Group
) -> list[Tensor]:
    """The short convolution of each span, which needs the last few tokens of the span before it."""
    tail = min(weight_WT.shape[1] - 1, len(spans[0]))
    ends_BTW = torch.cat([part[:, part.shape[1] - tail :] for part in mixed], dim=1)
    ends_BTW = undo_zigzag(gather_along(ends_BTW, group, dim=1), group.size, 1)
    convolved = []
    for part, span in zip(mixed, spans, strict=True):
        until = span.start // len(span) * tail
        needed = min(weight_WT.shape[1] - 1, until)
        longer = torch.cat([ends_BTW[:, until - needed : until], part], dim=1)
        documents = None if documents_BS is None else documents_BS[:, span.start - needed : span.stop]
        convolved.append(short_conv(longer, weight_WT, documents)[:, needed:])
    return convolved


def span_documents(span: range, document_BS: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The document numbers of a span, and that of the token before it."""
    if document_BS is None:
        return None, None
    return document_BS[:, span.start : span.stop], document_BS[:, span.start - 1] if span.start else None
