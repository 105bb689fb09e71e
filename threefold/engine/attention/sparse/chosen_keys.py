"""The mask of attention in which each query reads the keys that an indexer chose.

The work is that of dense attention in blocks of queries (`query_blocks.py`): keys that were not chosen are masked and
not skipped. `sparse_mla.py` attends with it.

Shapes: B batch, S queries and keys, C queries of a block, T keys up to its end, K chosen keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.engine.attention.sparse.indexer import visible_keys


@dataclass(frozen=True)
class ChosenKeys:
    """The positions of the chosen keys of each query. Those after it and in other documents are hidden all the same."""

    chosen_BSK: Tensor
    documents_BS: Tensor | None

    def spans(self, block: slice) -> tuple[slice, ...]:
        return (slice(0, block.stop),)

    def row_bytes(self, key_bytes: int, length: int, max_bytes: int) -> int:
        return key_bytes * length

    def hidden(self, block: slice, device: torch.device) -> Tensor:
        length = self.chosen_BSK.shape[1]
        chosen_BCK = self.chosen_BSK[:, block].long()
        read_BCT = torch.zeros(*chosen_BCK.shape[:2], length, dtype=torch.bool, device=device)
        read_BCT.scatter_(-1, chosen_BCK, True)
        read_BCT = (read_BCT & visible_keys(block, length, self.documents_BS, device))[..., : block.stop]
        return ~read_BCT[:, None]
