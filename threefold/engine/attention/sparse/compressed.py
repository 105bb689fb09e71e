"""Compressed attention (DeepSeek-V4): a query reads the last tokens, and entries that stand for tokens before them.

All heads share one key, which is the value as well. In one kind of layer an indexer chooses the entries that a query
reads, in another all are read, and in a third there are none. The forward has four steps: `compress` (projections to
small widths), `expand` (queries of heads, and keys), `core` (attention) and `project_out`. `shard/tensor_parallel.py`
puts its own function in place of `gather_latents` and `models/activation_memory.py` wraps the steps. A rule refuses
context parallelism: the windows of entries would lie across ranks.

Shapes: B batch, S sequence, D model dim, X other widths, H heads, d head dim, F rotary frequencies, W entries, I heads
of the indexer, C queries of a block, K chosen entries, G groups of heads, r rank of a group's outputs, i its inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.attention.query_blocks import attend_in_blocks, query_blocks
from threefold.engine.attention.sparse.entries import Pooling, Table, Windows, rotate_heads, rotate_tail
from threefold.engine.attention.sparse.indexer import MAX_SCORE_BYTES
from threefold.engine.context import count_event
from threefold.engine.layers.input_linears import InputHook, apply_linears, identity
from threefold.engine.layers.positions import Positions, document_starts
from threefold.engine.sum_dtype import fp32_or_wider
from threefold.spec.model import CompressedSpec

MOST_QUERIES = 1024  # of a block: it reads so many tokens beside the window


class EntryIndexer(nn.Module):
    """Chooses the entries of each query, by entries of its own. Like other indexers it does not train: the choice has
    no gradient, and transformers defines no loss on the scores."""

    def __init__(self, spec: CompressedSpec, dim: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        index = spec.indexer
        assert index is not None
        self.index = index
        self.pooling = Pooling(dim, index.head_dim, spec.rate, spec.overlaps, norm)
        self.q = nn.Linear(spec.q_rank, index.num_heads * index.head_dim, bias=False)
        self.weight = nn.Linear(dim, index.num_heads, bias=False)
        self.requires_grad_(False)

    @torch.no_grad()
    def read_tokens(self, x_BSD: Tensor) -> list[Tensor]:
        """Project what the entries are pooled from, and the weights of the heads."""
        return [self.pooling.kv(x_BSD), self.pooling.gate(x_BSD), self.weight(x_BSD)]

    @torch.no_grad()
    def choose(self, mask: "EntryMask", windows: Windows, table: Table, q_BSX: Tensor, *read: Tensor) -> Tensor:
        """The numbers of the chosen entries, (B, S, K), int32; entries that a query must not see are hidden later."""
        *pooled, weight_BSI = read
        entry_BWd = self.pooling.entries(windows, table, *pooled)
        q_BISd = self.queries(q_BSX, table)
        batch, count = entry_BWd.shape[:2]
        num_chosen = min(self.index.top_k, count)
        chosen_BSK = torch.empty(batch, q_BSX.shape[1], num_chosen, dtype=torch.int32, device=q_BSX.device)
        for block in query_blocks(q_BISd, 4 * batch * self.index.num_heads * max(1, count), MAX_SCORE_BYTES):
            score_BCW = self.scores(q_BISd[:, :, block], entry_BWd, weight_BSI[:, block])
            score_BCW = score_BCW.masked_fill(~mask.visible_entries(block), float("-inf"))
            chosen_BSK[:, block] = score_BCW.topk(num_chosen, dim=-1).indices
        return chosen_BSK

    @torch.no_grad()
    def queries(self, q_BSX: Tensor, table: Table) -> Tensor:
        """(B, I, S, d), from the latents of queries."""
        return rotate_heads(self.q(q_BSX).unflatten(-1, (-1, self.index.head_dim)), table).transpose(1, 2)

    @torch.no_grad()
    def scores(self, q_BICd: Tensor, entry_BWd: Tensor, weight_BCI: Tensor) -> Tensor:
        """The score of each entry for each query, (B, C, W), in fp32 at least."""
        dtype = fp32_or_wider(q_BICd.dtype)
        dots_BICW = (q_BICd.to(dtype) @ entry_BWd.to(dtype)[:, None].transpose(-1, -2)).relu_()
        weight_BCI = weight_BCI.to(dtype) * self.index.num_heads**-0.5
        return torch.einsum("bicw,bci->bcw", dots_BICW.mul_(self.index.head_dim**-0.5), weight_BCI)


@dataclass(frozen=True)
class EntryMask:
    """The keys that a query reads, of entries, which come first, and of tokens."""

    window: int
    rate: int
    last_BW: Tensor  # the last token of each entry
    documents_BS: Tensor | None
    chosen_BSK: Tensor | None = None  # None: all entries that end before a query

    def spans(self, block: slice) -> tuple[slice, ...]:
        """Entries end in their order, one in `rate` tokens at most; tokens before the window are skipped."""
        count = self.last_BW.shape[1]
        tokens = self._tokens(block)
        return slice(0, self._num_entries(block)), slice(count + tokens.start, count + tokens.stop)

    def row_bytes(self, key_bytes: int, length: int, max_bytes: int) -> int:
        keys = min(length, self.last_BW.shape[1] + self.window + MOST_QUERIES)
        return max(key_bytes * keys, max_bytes // MOST_QUERIES)

    def _num_entries(self, block: slice) -> int:
        return min(self.last_BW.shape[1], block.stop // self.rate) if self.rate else 0

    def _tokens(self, block: slice) -> slice:
        return slice(max(0, block.start - self.window + 1), block.stop)

    def visible_entries(self, block: slice) -> Tensor:
        """(B or 1, C, W)."""
        index_S = torch.arange(block.start, block.stop, device=self.last_BW.device)
        seen_BCW = self.last_BW[:, None] <= index_S[:, None]
        if self.documents_BS is None:
            return seen_BCW
        number_BS = document_starts(self.documents_BS).cumsum(dim=1)
        of_entry_BW = number_BS.gather(1, self.last_BW.clamp(max=number_BS.shape[1] - 1))
        return seen_BCW & (of_entry_BW[:, None] == number_BS[:, block, None])

    def hidden(self, block: slice, device: torch.device) -> Tensor:
        seen_BCW = self.visible_entries(block)
        if self.chosen_BSK is not None:
            chosen_BCK = self.chosen_BSK[:, block].long()
            read_BCW = torch.zeros(*chosen_BCK.shape[:2], seen_BCW.shape[-1], dtype=torch.bool, device=device)
            seen_BCW = seen_BCW & read_BCW.scatter_(-1, chosen_BCK, True)
        seen_BCW, tokens = seen_BCW[..., : self._num_entries(block)], self._tokens(block)
        index_S = torch.arange(tokens.start, tokens.stop, device=device, dtype=torch.int32)
        distance_CT = index_S[block.start - tokens.start :, None] - index_S
        hidden_BCT = ((distance_CT < 0) | (distance_CT >= self.window))[None]
        if self.documents_BS is not None:
            hidden_BCT = hidden_BCT | (self.documents_BS[:, block, None] != self.documents_BS[:, None, tokens])
        batch = max(len(seen_BCW), len(hidden_BCT))
        return torch.cat([~seen_BCW.expand(batch, -1, -1), hidden_BCT.expand(batch, -1, -1)], dim=-1)[:, None]


class CompressedAttention(nn.Module):
    def __init__(self, spec: CompressedSpec, dim: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        self.q_down = nn.Linear(dim, spec.q_rank, bias=False)
        self.q_norm = norm(spec.q_rank)
        self.q_up = nn.Linear(spec.q_rank, spec.q_dim, bias=False)
        self.kv = nn.Linear(dim, spec.head_dim, bias=False)
        self.kv_norm = norm(spec.head_dim)
        self.group_down = nn.Parameter(torch.empty(spec.out_groups * spec.out_rank, spec.q_dim // spec.out_groups))
        self.out = nn.Linear(spec.out_groups * spec.out_rank, dim, bias=False)
        self.sinks = nn.Parameter(torch.zeros(spec.num_heads))
        self.pooling = Pooling(dim, spec.head_dim, spec.rate, spec.overlaps, norm) if spec.rate else None
        self.indexer = EntryIndexer(spec, dim, norm) if spec.indexer is not None else None
        self.eps = getattr(self.kv_norm, "eps", 1e-6)
        self.gather_latents: InputHook = identity

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        return self.attend(positions, *self.compress(x_BSD))

    def compress(self, x_BSD: Tensor) -> list[Tensor]:
        """Latents of queries, keys, and what entries are pooled from; small, so that ranks gather them and not x."""
        pooled = () if self.pooling is None else (self.pooling.kv, self.pooling.gate)
        q_BSX, kv_BSd, *rest = apply_linears(x_BSD, (self.q_down, self.kv, *pooled))
        parts = [self.q_norm(q_BSX), self.kv_norm(kv_BSd), *rest]
        for_indexer = [] if self.indexer is None else self.indexer.read_tokens(x_BSD)
        return [*self._gathered(parts), *self._gathered(for_indexer)]

    def _gathered(self, parts: list[Tensor]) -> list[Tensor]:
        if self.gather_latents is identity or not parts:
            return parts
        widths = [part.shape[-1] for part in parts]
        return list(self.gather_latents(torch.cat(parts, dim=-1)).split(widths, dim=-1))

    def attend(self, positions: Positions, *latents: Tensor) -> Tensor:
        q_BHSd, key_BGTd, mask = self.expand(positions, *latents)
        return self.project_out(self.core(positions, q_BHSd, key_BGTd, *mask))

    def table(self, positions: Positions) -> Table:
        return positions.rope(self.spec.rope_dim, self.spec.rope_theta, self.spec.rope_scaling)

    def expand(
        self, positions: Positions, q_BSX: Tensor, kv_BSd: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Queries, keys (entries before tokens), and the tensors of the mask."""
        table = self.table(positions)
        q_BHSd = self.queries(q_BSX, table)
        kv_BSd = rotate_tail(kv_BSd, table)
        if self.pooling is None:
            return q_BHSd, kv_BSd[:, None], ()
        windows = Windows.of(positions, q_BSX.shape[1], self.spec.rate, q_BSX.device)
        pooled, for_indexer = rest[:2], rest[2:]
        entry_BWd = self.pooling.entries(windows, table, *pooled)
        chosen: tuple[Tensor, ...] = ()
        if self.indexer is not None:
            mask = EntryMask(self.window, self.spec.rate, windows.last_BW, positions.documents_BS)
            chosen = (self.indexer.choose(mask, windows, table, q_BSX, *for_indexer),)
        keys_BGTd = torch.cat([entry_BWd, kv_BSd], dim=1)[:, None]
        return q_BHSd, keys_BGTd, (windows.last_BW, *chosen)

    def queries(self, q_BSX: Tensor, table: Table) -> Tensor:
        """All heads, (B, H, S, d), after a norm without weights."""
        q_BSHd = self.q_up(q_BSX).unflatten(-1, (-1, self.spec.head_dim))
        return rotate_heads(F.rms_norm(q_BSHd, (self.spec.head_dim,), None, self.eps), table).transpose(1, 2)

    @property
    def window(self) -> int:
        assert self.spec.window is not None
        return self.spec.window

    def core(self, positions: Positions, q_BHSd: Tensor, key_BGTd: Tensor, *entries: Tensor) -> Tensor:
        """The outputs of the heads by token."""
        count_event("attention", "entries and a window in torch")
        if not entries:
            entries = (torch.empty(1, 0, dtype=torch.long, device=q_BHSd.device),)
        last_BW, *chosen = entries
        mask_tensors = last_BW, positions.documents_BS, *chosen
        make_mask = partial(EntryMask, self.window, self.spec.rate)
        scale = self.spec.logit_scale
        out_BHSd = attend_in_blocks(q_BHSd, key_BGTd, key_BGTd, scale, make_mask, *mask_tensors, sinks=self.sinks)
        return self.turn_back(out_BHSd.transpose(1, 2), self.table(positions))

    def turn_back(self, out_BSHd: Tensor, table: Table) -> Tensor:
        """Turn outputs back, so that what a key adds depends on its distance alone."""
        cos_BSF, sin_BSF = table
        return rotate_heads(out_BSHd, (cos_BSF, -sin_BSF))

    def project_out(self, out_BSHd: Tensor) -> Tensor:
        """Each group of heads to its own columns, and from all columns to the model dim."""
        down_Gri = self.group_down.unflatten(0, (-1, self.spec.out_rank))
        x_GTi = out_BSHd.flatten(0, 1).flatten(1).unflatten(1, (len(down_Gri), -1)).transpose(0, 1)
        y_TGr = torch.bmm(x_GTi, down_Gri.transpose(1, 2)).transpose(0, 1)
        y_BSD: Tensor = self.out(y_TGr.flatten(1).unflatten(0, out_BSHd.shape[:2]))
        return y_BSD
