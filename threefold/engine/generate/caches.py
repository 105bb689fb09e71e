"""What a layer remembers of the tokens before: keys and values, MLA's latents, or the state of the delta rule.

`cached_mixers.py` fills the caches. Rows of a batch may have different lengths: each slot of a cache knows the position
of its token, and what lies beyond the end of a row is never visible.

Shapes: B rows, G heads of the cache, C slots, S tokens, X widths, W convolution channels, T taps of the convolution,
H value heads, k key dim, v value dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
        """Which of the used slots a query at this position of its row attends to, (B, C)."""
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
