"""Positions and documents of the tokens of a batch, and what the layers derive from them once per forward.

`models/inputs.py` makes one `Positions` per microbatch and every mixer gets it: the rotary tables and the document
bounds are computed once and shared by the layers. Example: two packed documents [7, 7, 7, 9, 9] have positions [0, 1,
2, 0, 1] and cu_seqlens [0, 3, 5].

Shapes: B batch, S sequence, 3 axes of multimodal positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from threefold.engine.layers import rope
from threefold.spec.model import RopeScaling


@dataclass(frozen=True)
class DocumentBounds:
    """Where documents start in the flattened batch, as attention kernels for variable lengths take it."""

    cu_seqlens: Tensor  # int32, one element more than documents; the last one is B * S
    max_seqlen: int  # tokens of the longest document


@dataclass
class Positions:
    """The position of each token in its document, and the number of the document."""

    positions_BS: Tensor
    documents_BS: Tensor | None = None  # None: every row is one document
    whole_BS: Tensor | None = None  # positions of the whole sequence, where `positions_BS` are a rank's shard of it
    _tables: dict[tuple[int, float, RopeScaling | None, tuple[int, ...]], tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )
    axes_3BS: Tensor | None = None  # time, height and width, where pictures are among the tokens

    @classmethod
    def from_tokens(
        cls, tokens_BS: Tensor, documents_BS: Tensor | None = None, positions_BS: Tensor | None = None
    ) -> "Positions":
        """Positions count from the start of each document unless they are given."""
        if positions_BS is None:
            count_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
            positions_BS = count_BS
            if documents_BS is not None:
                start_BS = torch.where(document_starts(documents_BS), count_BS, 0).cummax(dim=1).values
                positions_BS = count_BS - start_BS
        return cls(positions_BS, documents_BS)

    def rope(
        self, dim: int, theta: float, scaling: RopeScaling | None, sections: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """The cosine and sine tables, shared by every layer with the same frequencies.

        With `sections` (`GqaSpec.rope_sections`) they turn by the three axes; among text alone these are equal.
        """
        key = (dim, theta, scaling, sections)
        if key not in self._tables:
            if sections and self.axes_3BS is not None:
                self._tables[key] = rope.multimodal_rope_tables(self.axes_3BS, *key)
            else:
                length = self.length if scaling is not None and scaling.depends_on_length else None
                self._tables[key] = rope.rope_tables(self.positions_BS, dim, theta, scaling, length)
        return self._tables[key]

    @property
    def length(self) -> Tensor:
        """The length of the longest document in the whole sequence, on the device."""
        return (self.positions_BS if self.whole_BS is None else self.whole_BS).max() + 1

    def at(self, spans: Sequence[range]) -> Tensor:
        """The positions of spans of the whole sequence, one behind the other."""
        whole_BS = self.positions_BS if self.whole_BS is None else self.whole_BS
        return torch.cat([whole_BS[:, span.start : span.stop] for span in spans], dim=1)

    @cached_property
    def bounds(self) -> DocumentBounds | None:
        """The bounds of the documents. Computing them waits for the device, so they are cached for the forward."""
        return None if self.documents_BS is None else document_bounds(self.documents_BS)


def document_starts(documents_BS: Tensor) -> Tensor:
    """True at the first token of each document; every row starts a document."""
    first_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return first_BS


def document_bounds(documents_BS: Tensor) -> DocumentBounds:
    """The bounds of the documents of all rows, one row behind the other. Waits for the device."""
    flat = document_starts(documents_BS).flatten().nonzero().flatten()
    end = flat.new_tensor([documents_BS.numel()])
    edges = torch.cat([flat, end])
    return DocumentBounds(edges.to(torch.int32), int(edges.diff().max()))
