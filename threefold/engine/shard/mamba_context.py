"""Context parallelism for Mamba-2: exchange sequence for heads, or pass states between spans.

The scan is affine in the state it starts from: state_after = factor * state_before + added, with one factor for each
head. Each rank computes both for its spans, all ranks gather them, and each derives the states before its own spans.
`context_parallel.py` sets `ContextParallelMamba` as a layer's `mix_over_ranks`.

Shapes: B batch, s this rank's shard of the sequence, S the whole, W channels of the convolution, H heads, G groups, R
heads of a group, n state dim, p head dim, X = R * p, I = H * p, P spans of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.engine.attention.gated_delta import document_numbers
from threefold.engine.attention.state_space.chunk_scan import ChunkedScan, chunk_scan, decay_state
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.dist.collectives import gather_along
from threefold.engine.dist.mesh import Group
from threefold.engine.shard.gated_delta_context import convolve_spans, span_documents
from threefold.engine.shard.sequence_layout import heads_to_sequence, rank_spans, sequence_to_heads, undo_zigzag


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
            # A head's factor stands for each of its columns, beside the rows of its state.
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
