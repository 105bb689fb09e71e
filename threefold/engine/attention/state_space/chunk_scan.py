"""The scan of Mamba-2 in chunks: GEMMs inside a chunk, and a recurrence of the state from chunk to chunk.

A head has a state (n x p) that decays and to which each token adds: state <- exp(dt A) state + B (dt x)^T, and
out = state^T C + D x. `mamba.py` runs the scan on whole sequences, `shard/recurrent_context.py` on spans of a sequence,
between which ranks pass states. The heads of a group share B and C.

Shapes: B batch, S sequence, H heads, G groups, R heads of a group, n state dim, p head dim, N chunks, C tokens of a
chunk.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.attention.delta_chunks import document_masks
from threefold.engine.sum_dtype import fp32_or_wider

CHUNK = 64  # tokens; a chunk saves a square of its length for each head


@dataclass(frozen=True)
class ScanInputs:
    """What the scan reads of each token, and the skip connection of each head."""

    x_BSHp: Tensor
    step_BSH: Tensor  # dt, in fp32 at least
    decay_rate_H: Tensor  # A, below zero
    write_BSGn: Tensor  # B
    read_BSGn: Tensor  # C
    skip_H: Tensor  # D


@dataclass(frozen=True)
class ChunkedScan:
    """A span of tokens, prepared for the recurrence over its chunks.

    For each chunk: output = within + read_decay * (read @ state), and the next state is decay * state + added.
    """

    within_BGNCX: Tensor  # the output of the chunk's own tokens, with the skip connection; X = R * p
    read_BGNCn: Tensor
    read_decay_BGNCR: Tensor  # of the incoming state, up to each token; 0 where another document began
    added_BGNnX: Tensor
    decay_BGNR: Tensor  # of the state over the chunk; 0 where a document starts in it
    length: int  # tokens of the span, without padding
    dtype: torch.dtype  # of the output

    def output(self, state_BGnX: Tensor | None = None) -> Tensor:
        """The span's output, (B, S, H, p), given the state before it."""
        states = self._states(state_BGnX)
        states_BGNnX = torch.stack(states[:-1], dim=2)
        from_state = (self.read_BGNCn @ states_BGNnX).unflatten(-1, (self.decay_BGNR.shape[-1], -1))
        out = self.within_BGNCX + (from_state * self.read_decay_BGNCR[..., None]).flatten(-2)
        out_BGSRp = out.flatten(2, 3)[:, :, : self.length].unflatten(-1, (self.decay_BGNR.shape[-1], -1))
        return out_BGSRp.transpose(1, 2).flatten(2, 3).to(self.dtype)

    def transition(self) -> tuple[Tensor, Tensor]:
        """What the span does to a state before it: the term that it adds (B, G, n, X), and its factor (B, G, R)."""
        first_BGR, *others = self.decay_BGNR.unbind(2)
        for decay_BGR in others:  # the backward of `prod` would ask the device whether there are zeros
            first_BGR = first_BGR * decay_BGR
        return self._states(None)[-1], first_BGR

    def _states(self, state_BGnX: Tensor | None) -> list[Tensor]:
        """The state before each chunk, and the one after the last."""
        state = torch.zeros_like(self.added_BGNnX[:, :, 0]) if state_BGnX is None else state_BGnX
        states = [state]
        for added_BGnX, decay_BGR in zip(self.added_BGNnX.unbind(2), self.decay_BGNR.unbind(2), strict=True):
            state = decay_state(state, decay_BGR) + added_BGnX
            states.append(state)
        return states


def decay_state(state_BGnX: Tensor, decay_BGR: Tensor) -> Tensor:
    """The state of each head times its factor."""
    each_BGnRp = state_BGnX.unflatten(-1, (decay_BGR.shape[-1], -1))
    return (each_BGnRp * decay_BGR[:, :, None, :, None]).flatten(-2)


def chunk_scan(
    inputs: ScanInputs,
    document_BS: Tensor | None = None,
    document_before_B: Tensor | None = None,
    chunk: int = CHUNK,
) -> ChunkedScan:
    """Prepare a span. `document_BS` numbers the documents; `document_before_B` is the document before the span, if any.

    The start of a document resets the state, as in `delta_chunks.py`: tokens of other documents are masked.
    """
    x_BSHp, dtype = inputs.x_BSHp, fp32_or_wider(inputs.x_BSHp.dtype)
    groups = inputs.write_BSGn.shape[2]
    write, read = (_split_chunks(part.to(dtype), chunk) for part in (inputs.write_BSGn, inputs.read_BSGn))
    step = inputs.step_BSH.to(dtype)
    log_decay = _split_chunks((step * inputs.decay_rate_H.to(dtype)).unflatten(-1, (groups, -1)), chunk)
    x = x_BSHp.to(dtype)
    stepped_BGNCX = _split_chunks((x * step[..., None]).unflatten(2, (groups, -1)).flatten(3), chunk)
    skipped_BGNCX = _split_chunks((x * inputs.skip_H.to(dtype)[:, None]).unflatten(2, (groups, -1)).flatten(3), chunk)
    if document_BS is None:
        document_BS = torch.zeros_like(x_BSHp[..., 0, 0], dtype=torch.long)
    # Padding of the last chunk neither decays nor writes, and counts as the last document, so that its state goes on.
    document_BS = torch.cat([document_BS, document_BS[:, -1:].expand(-1, -document_BS.shape[1] % chunk)], dim=1)
    masks = document_masks(document_BS.unflatten(1, (-1, chunk)), document_before_B)
    same, same_as_before, same_as_last, carries_state = masks

    total = log_decay.cumsum(dim=3)  # (B, G, N, C, R)
    by_head = total.transpose(3, 4)
    decay = (by_head[..., :, None] - by_head[..., None, :]).masked_fill(~same[:, :, :, None], float("-inf")).exp()
    scores_BGNRCC = (read @ write.transpose(-1, -2))[:, :, :, None] * decay
    num_heads = log_decay.shape[-1]
    stepped_BGNCRp = stepped_BGNCX.unflatten(-1, (num_heads, -1))
    within = (scores_BGNRCC @ stepped_BGNCRp.transpose(3, 4)).transpose(3, 4).flatten(4) + skipped_BGNCX
    write_decay = (total[:, :, :, -1:] - total).exp() * same_as_last[..., None]
    added = write.transpose(-1, -2) @ (stepped_BGNCRp * write_decay[..., None]).flatten(4)
    read_decay = total.exp() * same_as_before[..., None]
    decay_BGNR = total[:, :, :, -1].exp() * carries_state[..., None]
    return ChunkedScan(within, read, read_decay, added, decay_BGNR, x_BSHp.shape[1], x_BSHp.dtype)


def scan_by_token(inputs: ScanInputs, documents_BS: Tensor | None = None) -> Tensor:
    """The definition, one token after the other: the oracle of `chunk_scan`."""
    dtype = fp32_or_wider(inputs.x_BSHp.dtype)
    x, step = inputs.x_BSHp.to(dtype), inputs.step_BSH.to(dtype)
    each = x.shape[2] // inputs.write_BSGn.shape[2]
    write, read = (part.to(dtype).repeat_interleave(each, dim=2) for part in (inputs.write_BSGn, inputs.read_BSGn))
    state_BHnp = x.new_zeros(x.shape[0], x.shape[2], write.shape[-1], x.shape[-1])
    outs = []
    for t in range(x.shape[1]):
        keep_BH = (step[:, t] * inputs.decay_rate_H.to(dtype)).exp()
        if documents_BS is not None and t:
            keep_BH = keep_BH * (documents_BS[:, t] == documents_BS[:, t - 1])[:, None]
        added = write[:, t, :, :, None] * (x[:, t] * step[:, t, :, None])[:, :, None]
        state_BHnp = state_BHnp * keep_BH[..., None, None] + added
        out_BHp = torch.einsum("bhnp,bhn->bhp", state_BHnp, read[:, t])
        outs.append(out_BHp + inputs.skip_H.to(dtype)[:, None] * x[:, t])
    return torch.stack(outs, dim=1).to(inputs.x_BSHp.dtype)


def _split_chunks(x_BSGd: Tensor, chunk: int) -> Tensor:
    """(B, S, G, d) as (B, G, N, C, d), padded to whole chunks. Contiguous, so that no GEMM saves a copy of its own."""
    x_BGSd = x_BSGd.transpose(1, 2)
    missing = -x_BGSd.shape[2] % chunk
    padded = F.pad(x_BGSd, (0, 0, 0, missing)) if missing else x_BGSd
    return padded.contiguous().unflatten(2, (-1, chunk))
