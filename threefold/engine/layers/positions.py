"""Positions and documents of the tokens of a batch, and what the layers derive from them once per forward.

`models/inputs.py` makes one `Positions` per microbatch and every mixer gets it: the rotary tables and the document
bounds are computed once and shared by the layers. Example: two packed documents [7, 7, 7, 9, 9] have positions [0, 1,
2, 0, 1] and cu_seqlens [0, 3, 5].

Shapes: B batch, S sequence, 3 axes of multimodal positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from threefold.engine.layers import rope
from threefold.spec.model import RopeScaling


@dataclass(frozen=True)
class DocumentBounds:
    """Where documents start in the flattened batch, as attention kernels for variable lengths take it."""

    cu_seqlens: Tensor  # int32, one element more than documents; the last one is B * S
    max_seqlen: int  # tokens of the longest document
    edges: tuple[int, ...] | None = None  # `cu_seqlens` on the host, where it is known

    @classmethod
    def from_edges(cls, edges: Sequence[int], device: torch.device) -> "DocumentBounds":
        """Bounds that the host knows. It does not wait for the device to have them."""
        pinned = torch.tensor(edges, dtype=torch.int32, pin_memory=device.type == "cuda")
        longest = max(stop - start for start, stop in pairwise(edges))
        return cls(pinned.to(device, non_blocking=True), longest, tuple(edges))

    def edges_on_host(self) -> Sequence[int]:
        """`cu_seqlens` as numbers. Waits for the device where they are not known."""
        return tuple(self.cu_seqlens.tolist()) if self.edges is None else self.edges


@dataclass
class Positions:
    """The position of each token in its document, and the number of the document."""

    positions_BS: Tensor
    documents_BS: Tensor | None = None  # None: every row is one document
    whole_BS: Tensor | None = None  # positions of the whole sequence, where `positions_BS` are a rank's shard of it
    _tables: dict[tuple[int, float, RopeScaling | None, tuple[int, ...]], tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )
    tokens_BS: Tensor | None = None  # their ids, by which some routers choose experts
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
        """The bounds of the documents, cached for the forward: computing them may wait for the device."""
        return None if self.documents_BS is None else document_bounds(self.documents_BS)


def document_starts(documents_BS: Tensor) -> Tensor:
    """True at the first token of each document; every row starts a document."""
    first_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return first_BS


# The bounds of document numbers that `move_documents` has copied to a device, with the version of the tensor.
_bounds_of_moved = WeakIdKeyDictionary()


def move_documents(documents_BS: Tensor, device: torch.device) -> Tensor:
    """Document numbers on the device. Their bounds are computed here, on the host, and known to `document_bounds`."""
    moved_BS = documents_BS.to(device, non_blocking=True)
    if moved_BS is not documents_BS:
        edges = document_bounds(documents_BS).edges_on_host()
        _bounds_of_moved[moved_BS] = version_of(moved_BS), DocumentBounds.from_edges(edges, device)
    return moved_BS


def version_of(x: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not count it."""
    return 0 if x.is_inference() else x._version


def document_bounds(documents_BS: Tensor) -> DocumentBounds:
    """The bounds of the documents of all rows, one row behind the other.

    Waits for the device, unless `move_documents` brought the numbers there.
    """
    version, known = _bounds_of_moved.get(documents_BS, (0, None))
    if known is not None and version == version_of(documents_BS):
        bounds: DocumentBounds = known
        return bounds
    flat = document_starts(documents_BS).flatten().nonzero().flatten()
    end = flat.new_tensor([documents_BS.numel()])
    edges = torch.cat([flat, end])
    return DocumentBounds(edges.to(torch.int32), int(edges.diff().max()))
