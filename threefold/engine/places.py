"""Where each token of a batch stands: its position, its document, and what is derived from them once a forward.

Shapes: B batch, S sequence.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from threefold.engine import rope
from threefold.spec.model import RopeScaling


@dataclass(frozen=True)
class Bounds:
    """Where documents start in the flattened batch, as kernels for uneven lengths want it."""

    starts: Tensor  # int32, one more than documents; the last is B * S
    longest: int


@dataclass
class Places:
    positions_BS: Tensor
    documents_BS: Tensor | None = None
    _tables: dict[tuple[int, float, RopeScaling | None], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, tokens_BS: Tensor, documents_BS: Tensor | None = None, positions_BS: Tensor | None = None) -> "Places":
        """Positions count from the start of each document unless they are given."""
        if positions_BS is None:
            count_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
            positions_BS = count_BS
            if documents_BS is not None:
                start_BS = torch.where(starts(documents_BS), count_BS, 0).cummax(dim=1).values
                positions_BS = count_BS - start_BS
        return cls(positions_BS, documents_BS)

    def rope(self, dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
        """The tables, shared by every layer with the same frequencies."""
        key = (dim, theta, scaling)
        if key not in self._tables:
            self._tables[key] = rope.tables(self.positions_BS, dim, theta, scaling)
        return self._tables[key]

    @cached_property
    def bounds(self) -> Bounds | None:
        """Waits for the device, therefore once a forward and not once a layer."""
        return None if self.documents_BS is None else bounds_of(self.documents_BS)


def starts(documents_BS: Tensor) -> Tensor:
    """True where a run of one document begins; every row begins one."""
    first_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return first_BS


def bounds_of(documents_BS: Tensor) -> Bounds:
    flat = starts(documents_BS).flatten().nonzero().flatten()
    end = flat.new_tensor([documents_BS.numel()])
    edges = torch.cat([flat, end])
    return Bounds(edges.to(torch.int32), int(edges.diff().max()))
