"""The mixers of a layer with a cache: `prefill` reads prompts, `step` one token a row.

A cache holds what a layer remembers of the tokens before: keys and values, MLA's latents, or the state of the delta
rule. Rows of a batch may have different lengths: each slot of a cache knows the position of its token, and what lies
beyond the end of a row is never visible. A prompt goes through the module's own attention kernels. A token attends to
its cache in plain torch, with MLA's up projections absorbed into queries and outputs, so that the cache holds latents
only. `generate.py` calls `cached_mixer` for each block.

Shapes: B rows, S tokens, C slots of a cache, D model dim, H query heads (value heads of a state), G key/value heads, R
= H / G, d head dim, c latent dim, n unrotated or state dim, r rotated, k key dim, v value dim, X widths, W convolution
channels, T taps of the convolution, I inner channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.attention.delta_chunks import chunk_delta_rule, l2_normalize
from threefold.engine.attention.gated_delta import GatedDelta, HeadWeights, short_conv
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.mla import MlaAttention, query_heads
from threefold.engine.attention.sparse.compressed import CompressedAttention
from threefold.engine.attention.sparse.entries import Windows, rotate_tail
from threefold.engine.attention.sparse.sparse_mla import SparseMlaAttention
from threefold.engine.attention.state_space.chunk_scan import chunk_scan, decay_state
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.layers.positions import Positions
from threefold.engine.layers.rope import rotate
from threefold.engine.sum_dtype import fp32_or_wider

_FIRST_SLOTS = 64


class SlotCache:
    """Tensors of earlier tokens, (B, G, C, X) each: all tokens, or with a window the last ones in a ring."""

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.tensors: list[Tensor] = []
        self.positions_BC: Tensor | None = None  # of the token in each slot; -1 where there is none
        self._num_used = 0

    def fill(self, lengths: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Store the tokens of prompts, (B, G, S, X): of row b the first `lengths[b]`, or the last of them."""
        num_slots = max(_FIRST_SLOTS, 2 * max(lengths)) if self.window is None else self.window
        batch, device = len(lengths), tensors[0].device
        self.positions_BC = torch.full((batch, num_slots), -1, device=device)
        self.tensors = [x.new_zeros(*x.shape[:2], num_slots, x.shape[3]) for x in tensors]
        self._num_used = min(max(lengths), num_slots)
        for row, length in enumerate(lengths):
            kept = torch.arange(max(0, length - num_slots), length, device=device)
            self.positions_BC[row, kept % num_slots] = kept
            for target, x in zip(self.tensors, tensors, strict=True):
                target[row, :, kept % num_slots] = x[row, :, kept]

    def append(self, position_B: Tensor, longest: int, tensors: Sequence[Tensor]) -> None:
        """Store one token a row, (B, G, 1, X). `longest` is the largest of the positions, known on the host."""
        assert self.positions_BC is not None
        if self.window is None and longest >= self.positions_BC.shape[1]:
            self._grow()
        num_slots = self.positions_BC.shape[1]
        rows_B, slot_B = torch.arange(len(position_B), device=position_B.device), position_B % num_slots
        self.positions_BC[rows_B, slot_B] = position_B
        for target, x in zip(self.tensors, tensors, strict=True):
            target[rows_B, :, slot_B] = x[:, :, 0]
        self._num_used = min(max(self._num_used, longest + 1), num_slots)

    def used(self) -> list[Tensor]:
        """The tensors as far as any row has filled them."""
        return [x[:, :, : self._num_used] for x in self.tensors]

    def visible(self, position_B: Tensor) -> Tensor:
        """Mask the used slots that a query at this position of its row attends to, (B, C)."""
        assert self.positions_BC is not None
        key_BC, query_B1 = self.positions_BC[:, : self._num_used], position_B[:, None]
        seen_BC = (key_BC >= 0) & (key_BC <= query_B1)
        return seen_BC if self.window is None else seen_BC & (key_BC > query_B1 - self.window)

    def _grow(self) -> None:
        """Twice as many slots, so that copies cost a constant time for each token."""
        assert self.positions_BC is not None
        more = torch.full_like(self.positions_BC, -1)
        self.positions_BC = torch.cat([self.positions_BC, more], dim=1)
        self.tensors = [torch.cat([x, torch.zeros_like(x)], dim=2) for x in self.tensors]


@dataclass
class RecurrentState:
    """The state of the gated delta rule or of Mamba-2, and the inputs of its convolution that the next token reads."""

    state: Tensor  # (B, H, k, v), or of Mamba (B, groups, state dim, channels of a group)
    conv_BTW: Tensor  # T is one less than the taps


class CachedMixer(Protocol):
    """A mixer that remembers the tokens before."""

    def prefill(self, x_BSD: Tensor, positions: Positions, lengths: Sequence[int]) -> Tensor:
        """The mixer over prompts that start at position 0; row b has `lengths[b]` tokens, then padding."""
        ...

    def step(self, x_BSD: Tensor, positions: Positions, longest: int) -> Tensor:
        """The mixer for one more token of each row, at `positions`, of which `longest` is the largest."""
        ...


def cached_mixer(mixer: nn.Module) -> CachedMixer:
    if isinstance(mixer, GqaAttention):
        return CachedGqa(mixer)
    if isinstance(mixer, CompressedAttention):
        return CachedCompressed(mixer)
    if isinstance(mixer, SparseMlaAttention):
        return CachedSparseMla(mixer)
    if isinstance(mixer, MlaAttention):
        return CachedMla(mixer)
    if isinstance(mixer, Mamba):
        return CachedMamba(mixer)
    assert isinstance(mixer, GatedDelta), type(mixer)
    return CachedDelta(mixer)


class CachedGqa:
    """Grouped-query attention; a layer with a window keeps no more tokens than the window has."""

    def __init__(self, mixer: GqaAttention) -> None:
        self.mixer, self.cache = mixer, SlotCache(mixer.spec.window)

    def prefill(self, x_BSD: Tensor, positions: Positions, lengths: Sequence[int]) -> Tensor:
        q_BHSd, k_BGSd, v_BGSd, gate_BSHd = self.mixer.project(x_BSD, positions)
        self.cache.fill(lengths, (k_BGSd, v_BGSd))
        return self.mixer.project_out(self.mixer.core(positions, q_BHSd, k_BGSd, v_BGSd, gate_BSHd))

    def step(self, x_BSD: Tensor, positions: Positions, longest: int) -> Tensor:
        q_BHSd, k_BGSd, v_BGSd, gate_BSHd = self.mixer.project(x_BSD, positions)
        position_B = positions.positions_BS[:, 0]
        self.cache.append(position_B, longest, (k_BGSd, v_BGSd))
        k_BGCd, v_BGCd = self.cache.used()
        q_BGRd = q_BHSd.reshape(*k_BGSd.shape[:2], -1, q_BHSd.shape[-1])
        score_BGRC = q_BGRd @ k_BGCd.transpose(-1, -2) * self.mixer.spec.logit_scale
        weight_BGRC = attention_weights(score_BGRC, self.cache.visible(position_B), self.mixer.sinks)
        out_BSHd = (weight_BGRC.to(v_BGCd.dtype) @ v_BGCd).flatten(1, 2)[:, None]
        gated = out_BSHd if gate_BSHd is None else out_BSHd * gate_BSHd.sigmoid()
        return self.mixer.project_out(gated.flatten(2))


class CachedMla:
    """Multi-head latent attention; the cache holds the latent and the rotated key of all heads."""

    def __init__(self, mixer: MlaAttention) -> None:
        self.mixer, self.cache = mixer, SlotCache()
        spec = mixer.spec
        parameter = mixer.kv_up.weight
        # The map of the module itself, whatever it adds to its weight.
        identity_cc = torch.eye(spec.kv_rank, dtype=parameter.dtype, device=parameter.device)
        up_cHX = mixer.kv_up(identity_cc).unflatten(-1, (-1, spec.nope_dim + spec.v_dim))
        self.key_up_Hcn, self.value_up_Hcv = (
            part.transpose(0, 1).contiguous() for part in up_cHX.split([spec.nope_dim, spec.v_dim], dim=-1)
        )

    def prefill(self, x_BSD: Tensor, positions: Positions, lengths: Sequence[int]) -> Tensor:
        q_BSX, latent_BSc, k_BSr = self.mixer.compress(x_BSD)
        self.cache.fill(lengths, (latent_BSc[:, None], self._rotated(k_BSr, positions)))
        return self.mixer.attend_latents(positions, q_BSX, latent_BSc, k_BSr)

    def step(self, x_BSD: Tensor, positions: Positions, longest: int) -> Tensor:
        mixer, spec = self.mixer, self.mixer.spec
        q_BSX, latent_BSc, k_BSr = mixer.compress(x_BSD)
        position_B = positions.positions_BS[:, 0]
        more = self.read_more(x_BSD, positions)
        self.cache.append(position_B, longest, (latent_BSc[:, None], self._rotated(k_BSr, positions), *more))
        latent_BCc, k_BCr, *others = (x[:, 0] for x in self.cache.used())
        q_BHSd = query_heads(spec, mixer.query_up(q_BSX), self._table(positions))
        q_BHn, q_BHr = q_BHSd[:, :, 0].split([spec.nope_dim, spec.rope_dim], dim=-1)
        q_BHc = torch.einsum("bhn,hcn->bhc", q_BHn, self.key_up_Hcn)
        score_BHC = (q_BHc @ latent_BCc.transpose(-1, -2) + q_BHr @ k_BCr.transpose(-1, -2)) * mixer.scale
        visible_BC = self.choose(self.cache.visible(position_B), x_BSD, q_BSX, positions, *others)
        weight_BHC = attention_weights(score_BHC[:, None], visible_BC, None)[:, 0]
        out_BHv = torch.einsum("bhc,hcv->bhv", weight_BHC.to(latent_BCc.dtype) @ latent_BCc, self.value_up_Hcv)
        return mixer.project_out(out_BHv.flatten(1)[:, None])

    def read_more(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, ...]:
        """Read more of the tokens into the cache; nothing without an indexer."""
        return ()

    def choose(self, visible_BC: Tensor, x_BSD: Tensor, q_BSX: Tensor, positions: Positions, *others: Tensor) -> Tensor:
        """Choose the visible slots that a query reads: all of them without an indexer."""
        return visible_BC

    def _table(self, positions: Positions) -> tuple[Tensor, Tensor]:
        spec = self.mixer.spec
        return positions.rope(spec.rope_dim, spec.rope_theta, spec.rope_scaling)

    def _rotated(self, k_BSr: Tensor, positions: Positions) -> Tensor:
        return rotate(k_BSr[:, None], self._table(positions), self.mixer.spec.rope_pairs)


class CachedSparseMla(CachedMla):
    """Latent attention with an indexer, whose rotated keys the cache keeps too."""

    mixer: SparseMlaAttention

    def prefill(self, x_BSD: Tensor, positions: Positions, lengths: Sequence[int]) -> Tensor:
        q_BSX, latent_BSc, k_BSr = self.mixer.compress(x_BSD)
        tensors = (latent_BSc[:, None], self._rotated(k_BSr, positions), *self.read_more(x_BSD, positions))
        self.cache.fill(lengths, tensors)
        return self.mixer.attend_chosen(positions, q_BSX, latent_BSc, k_BSr, *self.mixer.read_for_indexer(x_BSD))

    def read_more(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, ...]:
        k_BSd, _ = self.mixer.indexer.read_tokens(x_BSD)
        return (self.mixer.indexer.rotate_heads(k_BSd[:, None], self._table(positions)),)

    def choose(self, visible_BC: Tensor, x_BSD: Tensor, q_BSX: Tensor, positions: Positions, *others: Tensor) -> Tensor:
        indexer = self.mixer.indexer
        (k_BCd,), (_, weight_BSI) = others, indexer.read_tokens(x_BSD)
        scores_BSC = indexer.scores(indexer.queries(q_BSX, self._table(positions)), k_BCd, weight_BSI)
        scores_BC = scores_BSC[:, 0].masked_fill(~visible_BC, float("-inf"))
        chosen_BK = scores_BC.topk(min(indexer.index.top_k, scores_BC.shape[-1]), dim=-1).indices
        return visible_BC & torch.zeros_like(visible_BC).scatter(-1, chosen_BK, True)


class CachedCompressed:
    """Compressed attention; the cache holds what keys and entries are made of, and each step makes them anew."""

    def __init__(self, mixer: CompressedAttention) -> None:
        self.mixer, self.cache = mixer, SlotCache()

    def prefill(self, x_BSD: Tensor, positions: Positions, lengths: Sequence[int]) -> Tensor:
        q_BSX, *stored = self.mixer.compress(x_BSD)
        self.cache.fill(lengths, [part_BSX[:, None] for part_BSX in stored])
        return self.mixer.attend(positions, q_BSX, *stored)

    def step(self, x_BSD: Tensor, positions: Positions, longest: int) -> Tensor:
        mixer, spec = self.mixer, self.mixer.spec
        q_BSX, *new = mixer.compress(x_BSD)
        position_B, table = positions.positions_BS[:, 0], mixer.table(positions)
        self.cache.append(position_B, longest, [part_BSX[:, None] for part_BSX in new])
        kv_BCd, *rest = (part[:, 0] for part in self.cache.used())
        slots_1C = torch.arange(kv_BCd.shape[1], device=x_BSD.device)[None]
        of_slots, last_B1 = Positions(slots_1C), position_B[:, None]
        keys_BTd = rotate_tail(kv_BCd, mixer.table(of_slots))
        visible_BT = self.cache.visible(position_B) & (slots_1C > last_B1 - mixer.window)
        if mixer.pooling is not None:
            windows = Windows.of(of_slots, kv_BCd.shape[1], spec.rate, x_BSD.device)
            entry_BWd = mixer.pooling.entries(windows, mixer.table(of_slots), *rest[:2])
            visible_BW = windows.last_BW <= last_B1
            if (indexer := mixer.indexer) is not None:
                scored_BWd = indexer.pooling.entries(windows, mixer.table(of_slots), *rest[2:4])
                scores_BW = indexer.scores(indexer.queries(q_BSX, table), scored_BWd, new[-1])[:, 0]
                scores_BW = scores_BW.masked_fill(~visible_BW, float("-inf"))
                chosen_BK = scores_BW.topk(min(indexer.index.top_k, scores_BW.shape[-1]), dim=-1).indices
                visible_BW = visible_BW & torch.zeros_like(visible_BW).scatter(-1, chosen_BK, True)
            keys_BTd, visible_BT = torch.cat([entry_BWd, keys_BTd], 1), torch.cat([visible_BW, visible_BT], 1)
        q_BGHd = mixer.queries(q_BSX, table).transpose(1, 2)
        score_BGHT = q_BGHd @ keys_BTd[:, None].transpose(-1, -2) * spec.logit_scale
        weight_BGHT = attention_weights(score_BGHT, visible_BT, mixer.sinks)
        return mixer.project_out(mixer.turn_back(weight_BGHT.to(keys_BTd.dtype) @ keys_BTd[:, None], table))


class CachedDelta:
    """The gated delta rule; the state does not grow with the text."""

    def __init__(self, mixer: GatedDelta) -> None:
        self.mixer = mixer
        self.weights = HeadWeights(mixer.conv, mixer.dt_bias, mixer.a_log)
        self.memory: RecurrentState | None = None

    def prefill(self, x_BSD: Tensor, positions: Positions, lengths: Sequence[int]) -> Tensor:
        mixer = self.mixer
        qkv_BSKX, ba_BSKY, z_BSHv = mixer.project(x_BSD)
        mixed_BSW = mixer.channels(qkv_BSKX)
        q, k, v = mixer.heads(F.silu(short_conv(mixed_BSW, mixer.conv, None)))
        g_BSH, beta_BSH = self.weights.gates(ba_BSKY)
        # Padding neither decays nor writes, so that the state after it is that of the prompt.
        length_B = torch.tensor(lengths, device=x_BSD.device)
        inside_BS1 = (positions.positions_BS < length_B[:, None])[..., None]
        chunked = chunk_delta_rule(q, k, v, g_BSH * inside_BS1, beta_BSH * inside_BS1)
        state_BHkv = chunked.transition()[..., : mixer.spec.v_dim].clone()
        self.memory = RecurrentState(state_BHkv, _last_tokens(mixed_BSW, lengths, mixer.conv.shape[1] - 1))
        return mixer.project_out(mixer.normalize_output(chunked.output(), z_BSHv))

    def step(self, x_BSD: Tensor, positions: Positions, longest: int) -> Tensor:
        mixer, memory = self.mixer, self.memory
        assert memory is not None
        qkv_BSKX, ba_BSKY, z_BSHv = mixer.project(x_BSD)
        taps_BTW = torch.cat([memory.conv_BTW, mixer.channels(qkv_BSKX)], dim=1)
        memory.conv_BTW = taps_BTW[:, 1:]
        q, k, v = mixer.heads(F.silu((taps_BTW * mixer.conv.T).sum(dim=1, keepdim=True)))
        g_BSH, beta_BSH = self.weights.gates(ba_BSKY)
        dtype = fp32_or_wider(q.dtype)
        q_BHk, k_BHk, v_BHv, g_BH, beta_BH = (x[:, 0].to(dtype) for x in (q, k, v, g_BSH, beta_BSH))
        q_BHk, k_BHk = l2_normalize(q_BHk) * q_BHk.shape[-1] ** -0.5, l2_normalize(k_BHk)
        state_BHkv = memory.state * g_BH.exp()[..., None, None]
        known_BHv = torch.einsum("bhkv,bhk->bhv", state_BHkv, k_BHk)
        correction_BHv = beta_BH[..., None] * (v_BHv - known_BHv)
        memory.state = state_BHkv + k_BHk[..., None] * correction_BHv[:, :, None]
        out_BSHv = torch.einsum("bhkv,bhk->bhv", memory.state, q_BHk)[:, None].to(q.dtype)
        return mixer.project_out(mixer.normalize_output(out_BSHv, z_BSHv))


class CachedMamba:
    """Mamba-2; the state does not grow with the text."""

    def __init__(self, mixer: Mamba) -> None:
        self.mixer, self.weights = mixer, mixer.head_weights()
        self.memory: RecurrentState | None = None

    def prefill(self, x_BSD: Tensor, positions: Positions, lengths: Sequence[int]) -> Tensor:
        mixer, weights = self.mixer, self.weights
        gate_BSI, mixed_BSW, step_BSH = mixer.project(x_BSD)
        convolved_BSW = weights.activate(short_conv(mixed_BSW, weights.conv_WT, None))
        inputs = mixer.scan_inputs(convolved_BSW, step_BSH, weights)
        # A step of no length neither decays nor writes, so that the state after padding is that of the prompt.
        length_B = torch.tensor(lengths, device=x_BSD.device)
        inside_BS1 = (positions.positions_BS < length_B[:, None])[..., None]
        scan = chunk_scan(replace(inputs, step_BSH=inputs.step_BSH * inside_BS1))
        state_BGnX, _ = scan.transition()
        self.memory = RecurrentState(state_BGnX, _last_tokens(mixed_BSW, lengths, mixer.conv.shape[1] - 1))
        return mixer.project_out(mixer.normalize_output(scan.output().flatten(2), gate_BSI))

    def step(self, x_BSD: Tensor, positions: Positions, longest: int) -> Tensor:
        mixer, weights, memory = self.mixer, self.weights, self.memory
        assert memory is not None
        gate_BSI, mixed_BSW, step_BSH = mixer.project(x_BSD)
        taps_BTW = torch.cat([memory.conv_BTW, mixed_BSW], dim=1)
        memory.conv_BTW = taps_BTW[:, 1:]
        convolved_BSW = weights.activate((taps_BTW * weights.conv_WT.T).sum(dim=1, keepdim=True))
        scan = chunk_scan(mixer.scan_inputs(convolved_BSW, step_BSH, weights), chunk=1)
        out_BSI = scan.output(memory.state).flatten(2)
        memory.state = decay_state(memory.state, scan.decay_BGNR[:, :, 0]) + scan.added_BGNnX[:, :, 0]
        return mixer.project_out(mixer.normalize_output(out_BSI, gate_BSI))


def _last_tokens(mixed_BSW: Tensor, lengths: Sequence[int], count: int) -> Tensor:
    """The inputs of a convolution that the token after each prompt still reads, zeros where a prompt has fewer."""
    padded = F.pad(mixed_BSW, (0, 0, count, 0))
    return torch.stack([row[length : length + count] for row, length in zip(padded, lengths, strict=True)])


def attention_weights(score_BGRC: Tensor, visible_BC: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over visible slots, in fp32 at least; a sink takes probability and has no slot."""
    score = score_BGRC.to(fp32_or_wider(score_BGRC.dtype)).masked_fill(~visible_BC[:, None, None], float("-inf"))
    if sinks is None:
        return score.softmax(dim=-1)
    column = sinks.to(score.dtype).view(1, *score.shape[1:3], 1).expand(*score.shape[:3], 1)
    return torch.cat([score, column], dim=-1).softmax(dim=-1)[..., :-1]
