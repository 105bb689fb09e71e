"""Shards of tensors in torch's distributed checkpoint format (DCP), so that any layout reads what another wrote.

Each rank writes one file with the rectangles it owns; the index says where each rectangle lies in its full tensor.
Tensors have the same names in every layout; on one rank the only rectangle is the full tensor. There are no collectives
here: callers (`checkpoint_io.py`, `weights/convert.py`) bring the ranks together.
"""

import struct
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from threefold.engine.dist.shard_placement import Placement, ShardRegion, replicated
from threefold.engine.run.checkpoint_manifest import INDEX, damaged
from threefold.engine.run.dcp_format import StoredChunk, read_index, read_tensor
from threefold.safe_files import open_regular


@dataclass(frozen=True, eq=False)
class CheckpointShard:
    """A rank's shard of a tensor, or some elements of the flattened shard.

    The dunder methods are torch's protocol for objects that are no tensors and can be saved: `_Checkpointable`.
    """

    placement: Placement
    memory: Tensor  # the shard, or flat elements of it
    start: int | None = None  # index of the first of the flat elements; None for the whole shard

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def size(self) -> torch.Size:
        """The shape of the full tensor, which torch compares with what was saved."""
        return torch.Size(self.placement.shape)

    def snapshot(self) -> "CheckpointShard":
        return CheckpointShard(self.placement, self.memory.detach().to("cpu", copy=True), self.start)

    @cached_property
    def chunks(self) -> dict[tuple[int, ...], Tensor]:
        """Views of the memory by their offsets in the full tensor."""
        memory = self.memory.detach()
        if self.start is None:
            assert tuple(memory.shape) == self.placement.local_shape, (memory.shape, self.placement)
            return {region.offsets: region.in_shard(memory) for region in self.placement.regions() if all(region.sizes)}
        regions = self.placement.flat_regions(self.start, self.start + memory.numel())
        return {r.offsets: _region_of_flat(memory, self.placement.local_shape, self.start, r) for r in regions}

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
        return [ChunkStorageMetadata(torch.Size(at), chunk.size()) for at, chunk in self.chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[tuple(index.offset)]


def _region_of_flat(flat: Tensor, shape: Sequence[int], start: int, region: ShardRegion) -> Tensor:
    """The view of a rectangle of a shard of `shape`, of which `flat` holds the elements from `start` on."""
    assert flat.dim() == 1
    strides = [flat.stride(0)] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    offset = sum(at * stride for at, stride in zip(region.local_offsets, strides, strict=True))
    return flat.as_strided(region.sizes, strides, flat.storage_offset() + offset - start * flat.stride(0))


State = Mapping[str, Tensor | CheckpointShard]


class _SavePlanner(DefaultSavePlanner):
    """Torch's planner, which also finds the chunks of a `CheckpointShard`."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, CheckpointShard) else super().lookup_object(index)


@dataclass(frozen=True)
class RankFile:
    """The contents of the file that one rank wrote."""

    plan: SavePlan
    results: list[WriteResult]


def write_rank_file(folder: Path, state: State, rank: int = 0, num_ranks: int = 1) -> RankFile:
    """Write this rank's file."""
    # Copying ahead would make every rank open a CUDA context on the first GPU, and all tensors are on the CPU already.
    writer, planner = FileSystemWriter(folder, per_thread_copy_ahead=0), _SavePlanner()
    planner.set_up_planner(dict(state), writer.storage_meta(), rank == 0)
    writer.set_up_storage_writer(rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = writer.prepare_global_plan([plan] * num_ranks)[rank]  # torch names the file after the index in the list
    return RankFile(plan, writer.write_data(planner.finish_plan(plan), planner).wait())


def write_index(folder: Path, written: Sequence[RankFile]) -> dict[str, tuple[str, list[int]]]:
    """Write the index of all files, once every rank has written; returns dtype and shape of each full tensor.

    Raises where elements are saved twice or not at all.
    """
    _check_coverage([rank_file.plan for rank_file in written])
    planner, writer = _SavePlanner(), FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    _, metadata = planner.create_global_plan([rank_file.plan for rank_file in written])
    writer.finish(metadata, [rank_file.results for rank_file in written])
    stored = metadata.state_dict_metadata
    return {
        name: (str(value.properties.dtype), list(value.size))
        for name, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
    }


def _check_coverage(plans: Sequence[SavePlan]) -> None:
    """Raise unless every element is saved once and all ranks agree on shapes and dtypes.

    Torch keeps one of two equal rectangles and takes shapes from the first rank. Where elements are missing, torch 2.11
    does not say in which tensor.
    """
    owners: dict[MetadataIndex, int] = {}
    tensors: dict[str, tuple[int, Any]] = {}
    saved: Counter[str] = Counter()
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if item.index in owners:
                raise ValueError(f"{name} at {item.index.offset} is saved by ranks {owners[item.index]} and {rank}")
            owners[item.index] = rank
            assert data is not None
            other, facts = tensors.setdefault(name, (rank, (data.size, data.properties.dtype)))
            if facts != (data.size, data.properties.dtype):
                raise ValueError(f"{name} has another shape or dtype on rank {rank} than on rank {other}")
            saved[name] += data.chunk.sizes.numel()
    for name, (_, (size, _)) in tensors.items():
        if saved[name] != size.numel():
            raise ValueError(f"{name}: {saved[name]} of {size.numel()} elements are saved")


class StoredTensors:
    """The tensors of a checkpoint on disk, whatever layout wrote them. The index is read once.

    `files` are those that a manifest lists, and no others are read; None reads whatever the index names. The index is
    held to be no longer than they and the `num_tensors` of the manifest need.
    """

    def __init__(self, folder: Path, files: Collection[str] | None = None, num_tensors: int | None = None) -> None:
        self._folder = folder
        self.tensors = read_index(folder, files, num_tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a full tensor; None where there is no such tensor."""
        return self.tensors[name].shape if name in self.tensors else None

    def fill(self, want: State) -> None:
        """Read full tensors and shards in place. A stored rectangle is read once, however many chunks it overlaps."""
        shards = {
            name: value if isinstance(value, CheckpointShard) else CheckpointShard(replicated(value.shape, ()), value)
            for name, value in want.items()
        }
        reads: dict[tuple[StoredChunk, str], list[ReadItem]] = defaultdict(list)
        for name, shard in shards.items():
            chunks = {chunk.offsets: chunk for chunk in self.tensors[name].chunks} if shard.chunks else {}
            for item in self._read_items(name, shard):
                reads[chunks[tuple(item.storage_index.offset or ())], name].append(item)
        for chunk, name in sorted(reads, key=lambda key: (key[0].file, key[0].start)):
            stored = self._read(chunk, self.tensors[name].dtype)
            for item in reads[chunk, name]:
                target = shards[name].__get_tensor_shard__(item.dest_index)
                _slice(target, item.dest_offsets, item.lengths).copy_(
                    _slice(stored, item.storage_offsets, item.lengths)
                )

    def _read_items(self, name: str, shard: CheckpointShard) -> list[ReadItem]:
        if not shard.chunks:
            return []
        tensor = self.tensors[name]
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        facts = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)
        items = create_read_items_for_chunk_list(name, facts, shard.__create_chunk_list__())
        num_found, wanted = sum(i.lengths.numel() for i in items), sum(chunk.numel() for chunk in shard.chunks.values())
        if num_found != wanted:
            raise damaged(self._folder / INDEX, f"{wanted - num_found} elements of {name} are missing")
        return items

    def _read(self, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        path = self._folder / chunk.file
        try:
            with open_regular(path, within=self._folder) as file:
                return read_tensor(file, chunk.start, chunk.num_bytes, dtype, chunk.sizes)
        except (OSError, ValueError, KeyError, BadZipFile, struct.error, RuntimeError, OverflowError) as error:
            reason = f"it lacks {str(error)[:200]}" if isinstance(error, KeyError) else error
            raise damaged(path, f"{self._folder.name}/{chunk.file} cannot be read: {reason}") from None


def _slice(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
