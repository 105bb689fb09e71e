"""Entries of compressed attention (DeepSeek-V4): each is pooled from the tokens of one window of a document.

A projection gives a token its columns and another one their weights; a softmax over the tokens of a window, channel by
channel, makes one entry of them. Windows begin with their document, so that packed documents are as those alone, and
tokens after a document's last whole window are in none. `compressed.py` calls it.

Shapes: B batch, S sequence, D model dim, X columns of the projections, W entries, R tokens of a window, d head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.layers.positions import Positions, document_starts
from threefold.engine.sum_dtype import fp32_or_wider

Table = tuple[Tensor, Tensor]  # cosines and sines


@dataclass(frozen=True)
class Windows:
    """The tokens of each entry of a sequence. There are as many as one document would have; with several, the last
    ones may be of no window, and no query reads them."""

    last_BW: Tensor  # the index of the last token; the length of the sequence where there is no window
    first_BW: Tensor  # the index of the first one
    follows_BW: Tensor  # whether the entry before is of the same document
    rate: int
    is_regular: bool  # whether every row is one document

    @classmethod
    def of(cls, positions: Positions, length: int, rate: int, device: torch.device) -> "Windows":
        count = length // rate
        if positions.documents_BS is None:
            first_1W = (torch.arange(count, device=device) * rate)[None]
            return cls(first_1W + rate - 1, first_1W, first_1W > 0, rate, True)
        start_BS = document_starts(positions.documents_BS)
        index_S = torch.arange(length, device=device)
        document_BS = start_BS.cumsum(dim=1)
        inside_BS = index_S - torch.where(start_BS, index_S, 0).cummax(dim=1).values
        end_S = index_S + rate - 1
        is_whole_BS = (end_S < length) & (document_BS[:, end_S.clamp(max=length - 1)] == document_BS)
        begins_BS = (inside_BS % rate == 0) & is_whole_BS
        # Tokens that begin a window come first, in their order; there are never more of them than `count`.
        first_BW = (~begins_BS).to(torch.int8).argsort(dim=1, stable=True)[:, :count]
        is_window_BW = begins_BS.gather(1, first_BW)
        last_BW = torch.where(is_window_BW, first_BW + rate - 1, length)
        follows_BW = is_window_BW & (inside_BS.gather(1, first_BW) > 0)
        return cls(last_BW, first_BW, follows_BW, rate, False)

    def gather(self, x_BSX: Tensor) -> Tensor:
        """The tokens of each window, (B, W, R, X)."""
        count = self.first_BW.shape[1]
        if self.is_regular:
            return x_BSX[:, : count * self.rate].unflatten(1, (count, self.rate))
        token_BWR = self.first_BW[..., None] + torch.arange(self.rate, device=x_BSX.device)
        token_BX = token_BWR.clamp(max=x_BSX.shape[1] - 1).flatten(1)
        rows = x_BSX.gather(1, token_BX[..., None].expand(-1, -1, x_BSX.shape[-1]))
        return rows.unflatten(1, (count, self.rate))

    def rotary(self, table: Table) -> Table:
        """The rotary table of the entries, which turn by the position of their first token."""
        cos_BSF, sin_BSF = table
        if self.is_regular:
            taken = slice(0, self.first_BW.shape[1] * self.rate, self.rate)
            return cos_BSF[:, taken], sin_BSF[:, taken]
        index_BWF = self.first_BW[..., None].expand(-1, -1, cos_BSF.shape[-1])
        return cos_BSF.gather(1, index_BWF), sin_BSF.gather(1, index_BWF)


class Pooling(nn.Module):
    """The weights with which entries are pooled. Where windows overlap, a token has columns for the entry of its own
    window, and before them others for the next entry."""

    def __init__(self, dim: int, head_dim: int, rate: int, overlaps: bool, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.head_dim, self.rate, self.overlaps = head_dim, rate, overlaps
        columns = head_dim * (2 if overlaps else 1)
        self.kv = nn.Linear(dim, columns, bias=False)
        self.gate = nn.Linear(dim, columns, bias=False)
        self.position_bias = nn.Parameter(torch.zeros(rate, columns))
        self.norm = norm(head_dim)

    def entries(self, windows: Windows, table: Table, kv_BSX: Tensor, gate_BSX: Tensor) -> Tensor:
        """The entries, turned, (B, W, d)."""
        return rotate_tail(self.pool(windows, kv_BSX, gate_BSX), windows.rotary(table))

    def pool(self, windows: Windows, kv_BSX: Tensor, gate_BSX: Tensor) -> Tensor:
        """The entries after their norm, (B, W, d)."""
        kv_BWRX, gate_BWRX = windows.gather(kv_BSX), windows.gather(gate_BSX) + self.position_bias
        if self.overlaps:
            follows = windows.follows_BW[..., None, None]
            kv_BWRX = torch.cat([_of_entry_before(kv_BWRX, self.head_dim), kv_BWRX[..., self.head_dim :]], dim=2)
            before = _of_entry_before(gate_BWRX, self.head_dim).masked_fill(~follows, float("-inf"))
            gate_BWRX = torch.cat([before, gate_BWRX[..., self.head_dim :]], dim=2)
        weight_BWRX = gate_BWRX.softmax(dim=2, dtype=fp32_or_wider(gate_BWRX.dtype)).to(kv_BWRX.dtype)
        entries: Tensor = self.norm((kv_BWRX * weight_BWRX).sum(dim=2))
        return entries


def _of_entry_before(x_BWRX: Tensor, head_dim: int) -> Tensor:
    """The first columns of the tokens of the window before, which the first entry has none of."""
    return F.pad(x_BWRX[..., :head_dim], (0, 0, 0, 0, 1, 0))[:, :-1]


def rotate_tail(x_BSd: Tensor, table: Table) -> Tensor:
    """Turn the last dims, neighbors together, and leave them in their places: keys are values too."""
    cos, sin = (part.to(x_BSd.dtype) for part in table)
    rest, tail = x_BSd.split([x_BSd.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    first, second = tail.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([rest, turned], dim=-1)


def rotate_heads(x_BSHd: Tensor, table: Table) -> Tensor:
    cos_BSF, sin_BSF = table
    return rotate_tail(x_BSHd, (cos_BSF[:, :, None], sin_BSF[:, :, None]))
