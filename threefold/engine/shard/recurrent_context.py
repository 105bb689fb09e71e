"""Context parallelism for the gated delta rule and Mamba-2: exchange sequence for heads, or pass states between spans.

Both recurrences are affine in the state they start from: state_after = factor @ state_before + added, where the factor
of Mamba-2 is one number for each head. Each rank computes factor and added (k x v) of its spans, all ranks gather them,
and each derives the states before its own spans. `context_parallel.py` sets `ContextParallelDelta` and
`ContextParallelMamba` as a layer's `mix_over_ranks`.

Shapes: B batch, s this rank's shard of the sequence, S the whole, W channels of the convolution, P spans of all ranks;
of the delta rule K key heads, H value heads, k key dim, v value dim, X and Y columns of a key head; of Mamba-2 H heads,
G groups, R heads of a group, n state dim, p head dim, X = R * p, I = H * p.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.engine.attention.delta_chunks import ChunkedDelta, chunk_delta_rule
from threefold.engine.attention.fused_delta import FusedSpan, count_delta_rule, fused_delta_rule
from threefold.engine.attention.gated_delta import GatedDelta, HeadWeights, document_numbers, short_conv
from threefold.engine.attention.state_space.chunk_scan import ChunkedScan, chunk_scan, decay_state
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.dist.collectives import gather_along
from threefold.engine.dist.mesh import Group
from threefold.engine.layers.positions import DocumentBounds
from threefold.engine.shard.sequence_layout import heads_to_sequence, rank_spans, sequence_to_heads, undo_zigzag


@dataclass(frozen=True)
class ContextParallelDelta:
    """`a2a` exchanges heads where the key heads divide by cp; every other `cp_comm` passes states."""

    cp_comm: str
    group: Group

    def __call__(
        self,
        layer: GatedDelta,
        qkv_BsKX: Tensor,
        ba_BsKY: Tensor,
        documents_BS: Tensor | None,
        bounds: DocumentBounds | None = None,
    ) -> Tensor:
        if self.cp_comm == "a2a" and qkv_BsKX.shape[2] % self.group.size == 0:
            qkv, ba = sequence_to_heads([qkv_BsKX, ba_BsKY], self.group)
            head_weights = layer.head_weights(self.group.rank, self.group.size)
            return heads_to_sequence(layer.mix(qkv, ba, documents_BS, bounds, head_weights), self.group)
        return self._pass_states(layer, qkv_BsKX, ba_BsKY, documents_BS)

    def _pass_states(self, layer: GatedDelta, qkv: Tensor, ba: Tensor, documents_BS: Tensor | None) -> Tensor:
        spans = rank_spans(qkv.shape[1] * self.group.size, self.group.size, self.group.rank)
        sizes = [len(span) for span in spans]
        weights = HeadWeights(layer.conv, layer.dt_bias, layer.a_log)
        document_BS = None if documents_BS is None else document_numbers(documents_BS)
        # The effect of a span on a state needs k more values, with which the kernels were not compared on a GPU.
        fused = fused_delta_rule(qkv, layer.spec.k_dim, layer.spec.v_dim + layer.spec.k_dim, layer.kernels)
        count_delta_rule(fused)
        parts: list[ChunkedDelta | FusedSpan] = []
        longer = spans_with_tails(qkv.split(sizes, dim=1), spans, layer.conv.shape[1], documents_BS, self.group)
        for span, (qkv_BTKX, documents, tail), gates in zip(spans, longer, ba.split(sizes, dim=1), strict=True):
            heads = layer.convolve(qkv_BTKX, layer.conv, documents, normalize=fused is not None)
            q, k, v = (part[:, tail:] for part in heads)
            span_settings = span_documents(span, document_BS)
            if fused is None:
                q, k = (part.repeat_interleave(layer.values_per_key, dim=2) for part in (q, k))
                parts.append(chunk_delta_rule(q, k, v, *weights.gates(gates), *span_settings))
            else:
                a, b = weights.raw_gates(gates)
                parts.append(fused.span(q, k, v, a, b, layer.a_log, layer.dt_bias, *span_settings))
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
    longer = spans_with_tails(mixed, spans, weight_WT.shape[1], documents_BS, group)
    return [short_conv(part, weight_WT, documents)[:, tail:] for part, documents, tail in longer]


def spans_with_tails(
    parts: Sequence[Tensor], spans: Sequence[range], taps: int, documents_BS: Tensor | None, group: Group
) -> Iterator[tuple[Tensor, Tensor | None, int]]:
    """Each span after the last few tokens of the span before it, the documents of both, and how many these few are."""
    tail = min(taps - 1, len(spans[0]))
    ends = torch.cat([part[:, part.shape[1] - tail :] for part in parts], dim=1)
    ends = undo_zigzag(gather_along(ends, group, dim=1), group.size, 1)
    for part, span in zip(parts, spans, strict=True):
        until = span.start // len(span) * tail
        needed = min(taps - 1, until)
        documents = None if documents_BS is None else documents_BS[:, span.start - needed : span.stop]
        yield torch.cat([ends[:, until - needed : until], part], dim=1), documents, needed


def span_documents(span: range, document_BS: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The document numbers of a span, and that of the token before it."""
    if document_BS is None:
        return None, None
    return document_BS[:, span.start : span.stop], document_BS[:, span.start - 1] if span.start else None


@dataclass(frozen=True)
class ContextParallelMamba:
    """`a2a` exchanges groups where they divide by cp; every other `cp_comm` passes states."""

    cp_comm: str
    group: Group

    def __call__(self, layer: Mamba, mixed_BsW: Tensor, step_BsH: Tensor, documents_BS: Tensor | None) -> Tensor:
        num_groups = layer.channel_parts()[1] // layer.spec.state_dim
        if self.cp_comm == "a2a" and num_groups % self.group.size == 0:
            return self._exchange_heads(layer, mixed_BsW, step_BsH, num_groups, documents_BS)
        return self._pass_states(layer, mixed_BsW, step_BsH, documents_BS)

    def _exchange_heads(
        self, layer: Mamba, mixed_BsW: Tensor, step_BsH: Tensor, num_groups: int, documents_BS: Tensor | None
    ) -> Tensor:
        parts = [*mixed_BsW.split(layer.channel_parts(), dim=-1), step_BsH]
        parts = sequence_to_heads([part.unflatten(-1, (num_groups, -1)) for part in parts], self.group)
        *channels, step_BSH = (part.flatten(2) for part in parts)
        weights = layer.head_weights(self.group.rank, self.group.size)
        out_BSI = layer.mix(torch.cat(channels, dim=-1), step_BSH, documents_BS, weights)
        by_head = out_BSI.unflatten(-1, (-1, layer.spec.head_dim))
        return heads_to_sequence(by_head, self.group).flatten(2)

    def _pass_states(self, layer: Mamba, mixed_BsW: Tensor, step_BsH: Tensor, documents_BS: Tensor | None) -> Tensor:
        spans = rank_spans(mixed_BsW.shape[1] * self.group.size, self.group.size, self.group.rank)
        sizes = [len(span) for span in spans]
        weights = layer.head_weights()
        convolved = convolve_spans(mixed_BsW.split(sizes, dim=1), spans, weights.conv_WT, documents_BS, self.group)
        document_BS = None if documents_BS is None else document_numbers(documents_BS)
        scans = [
            chunk_scan(layer.scan_inputs(weights.activate(part), step, weights), *span_documents(span, document_BS))
            for part, step, span in zip(convolved, step_BsH.split(sizes, dim=1), spans, strict=True)
        ]
        states = self._initial_states(scans, spans)
        outs = [scan.output(state) for scan, state in zip(scans, states, strict=True)]
        return torch.cat(outs, dim=1).flatten(2)

    def _initial_states(self, scans: Sequence[ChunkedScan], spans: Sequence[range]) -> list[Tensor]:
        """The state before each of this rank's spans. Terms and factors travel in one tensor: n + 1 rows of X."""
        effects = []
        for scan in scans:
            added_BGnX, factor_BGR = scan.transition()
            # A head's factor stands for each of its columns, next to the rows of its state.
            factor_BG1X = factor_BGR.repeat_interleave(added_BGnX.shape[-1] // factor_BGR.shape[-1], dim=-1)[:, :, None]
            effects.append(torch.cat([added_BGnX, factor_BG1X], dim=2))
        all_P = undo_zigzag(gather_along(torch.stack(effects), self.group), self.group.size, 0)
        wanted = [span.start // len(span) for span in spans]
        num_heads = scans[0].decay_BGNR.shape[-1]
        state = torch.zeros_like(all_P[0, :, :, :-1])
        states = {0: state}
        for number in range(max(wanted)):
            factor_BGR = all_P[number, :, :, -1].unflatten(-1, (num_heads, -1))[..., 0]
            state = decay_state(state, factor_BGR) + all_P[number, :, :, :-1]
            states[number + 1] = state
        return [states[number] for number in wanted]
