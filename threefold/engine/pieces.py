"""Rectangles of whole tensors in torch's checkpoint format (DCP), so that any layout reads what another wrote.

Each rank writes one file of the rectangles it owns; the index says where each lies in its whole. Names are those of
a checkpoint of one rank, whose only rectangle is the whole. No collectives: who calls brings the ranks together.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from threefold.engine.shard.placement import Box, Placement, whole


@dataclass(frozen=True, eq=False)
class Piece:
    """A rank's piece of a tensor; where `first` is given, elements from there on of the flattened piece.

    The dunder methods are torch's protocol for what is no tensor and yet can be saved: `_Checkpointable`.
    """

    placement: Placement
    memory: Tensor  # the piece, or flat elements of it
    first: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def size(self) -> torch.Size:
        """Of the whole: torch compares it with what was saved."""
        return torch.Size(self.placement.shape)

    def snapshot(self) -> "Piece":
        return Piece(self.placement, self.memory.detach().to("cpu", copy=True), self.first)

    @cached_property
    def parts(self) -> dict[tuple[int, ...], Tensor]:
        """Views of the memory, by where they lie in the whole."""
        memory = self.memory.detach()
        if self.first is None:
            assert tuple(memory.shape) == self.placement.local_shape, (memory.shape, self.placement)
            return {box.offsets: box.of(memory) for box in self.placement.boxes() if all(box.sizes)}
        boxes = self.placement.boxes_of(self.first, self.first + memory.numel())
        return {box.offsets: _within_flat(memory, self.placement.local_shape, self.first, box) for box in boxes}

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:  # noqa: A002
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), part.size()) for at, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]


def _within_flat(flat: Tensor, shape: Sequence[int], first: int, box: Box) -> Tensor:
    """The rectangle `box` of a piece of `shape`, whose elements from `first` on are `flat`."""
    assert flat.dim() == 1
    strides = [flat.stride(0)] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    start = sum(at * stride for at, stride in zip(box.local, strides, strict=True)) - first * flat.stride(0)
    return flat.as_strided(box.sizes, strides, flat.storage_offset() + start)


State = Mapping[str, Tensor | Piece]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, Piece) else super().lookup_object(index)


@dataclass(frozen=True)
class Written:
    """What a rank put into its file."""

    plan: SavePlan
    results: list[WriteResult]


def write_pieces(folder: Path, state: State, rank: int = 0, num_ranks: int = 1) -> Written:
    """This rank's file."""
    # Copying ahead would make a context on the first GPU for every rank, and everything is on the CPU already.
    writer, planner = FileSystemWriter(folder, per_thread_copy_ahead=0), _SavePlanner()
    planner.set_up_planner(dict(state), writer.storage_meta(), rank == 0)
    writer.set_up_storage_writer(rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = writer.prepare_global_plan([plan] * num_ranks)[rank]  # names the file after the place in the list
    return Written(plan, writer.write_data(planner.finish_plan(plan), planner).wait())


def write_index(folder: Path, written: Sequence[Written]) -> dict[str, tuple[str, list[int]]]:
    """Where everything is, once every rank has written; returns dtype and shape of each whole.

    Raises where elements are saved twice or not at all.
    """
    _check_alike([piece.plan for piece in written])
    planner, writer = _SavePlanner(), FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    _, metadata = planner.create_global_plan([piece.plan for piece in written])
    writer.finish(metadata, [piece.results for piece in written])
    stored = metadata.state_dict_metadata
    return {
        name: (str(value.properties.dtype), list(value.size))
        for name, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
    }


def _check_alike(plans: Sequence[SavePlan]) -> None:
    """Torch keeps one of two equal rectangles and believes the first rank about shapes; to us both are mistakes. Where
    elements are missing, 2.11 does not say of what."""
    owners: dict[MetadataIndex, int] = {}
    wholes: dict[str, tuple[int, Any]] = {}
    saved: Counter[str] = Counter()
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if item.index in owners:
                raise ValueError(f"{name} at {item.index.offset} is saved by ranks {owners[item.index]} and {rank}")
            owners[item.index] = rank
            assert data is not None
            other, facts = wholes.setdefault(name, (rank, (data.size, data.properties.dtype)))
            if facts != (data.size, data.properties.dtype):
                raise ValueError(f"{name} has another shape or dtype on rank {rank} than on rank {other}")
            saved[name] += data.chunk.sizes.numel()
    for name, (_, (size, _)) in wholes.items():
        if saved[name] != size.numel():
            raise ValueError(f"{name}: {saved[name]} of {size.numel()} elements are saved")


class Stored:
    """The tensors of a checkpoint, whatever layout wrote them. The index is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of the whole; None where there is no such tensor."""
        value = self._metadata.state_dict_metadata.get(name)
        return tuple(value.size) if isinstance(value, TensorStorageMetadata) else None

    def fill(self, want: State) -> None:
        """Whole tensors and pieces, in place. A stored rectangle is read once, however many parts it reaches into."""
        pieces = {n: v if isinstance(v, Piece) else Piece(whole(v.shape, ()), v) for n, v in want.items()}
        reads: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for name, piece in pieces.items():
            for item in self._items(name, piece):
                reads[item.storage_index].append(item)
        where = self._metadata.storage_data
        for index in sorted(reads, key=lambda index: (where[index].relative_path, where[index].offset)):
            stored = self._read(where[index])
            for item in reads[index]:
                part = pieces[index.fqn].__get_tensor_shard__(item.dest_index)
                _slice(part, item.dest_offsets, item.lengths).copy_(_slice(stored, item.storage_offsets, item.lengths))

    def _items(self, name: str, piece: Piece) -> list[ReadItem]:
        if not piece.parts:
            return []
        facts = self._metadata.state_dict_metadata[name]
        assert isinstance(facts, TensorStorageMetadata)
        items = create_read_items_for_chunk_list(name, facts, piece.__create_chunk_list__())
        found, wanted = sum(i.lengths.numel() for i in items), sum(part.numel() for part in piece.parts.values())
        if found != wanted:
            raise ValueError(f"{wanted - found} elements of {name} are missing")
        return items

    def _read(self, entry: Any) -> Tensor:
        with (self._folder / entry.relative_path).open("rb") as file:
            view = self._reader._slice_file(file, entry)
            return torch.load(view, map_location="cpu", weights_only=True)


def _slice(of: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return of[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
