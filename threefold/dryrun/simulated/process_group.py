"""A fake process group of any size, in which this process is one rank, and FSDP on meta tensors.

Collectives of the fake group return at once. `rehearse_rank` and `measured.real_rank` enter `fake_process_group`; the
other contexts are for rehearsals only, whose tensors have no memory.
"""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from threefold.engine.data_parallel import full_matrices
from threefold.engine.data_parallel.full_matrices import Ranges, ShardInfo
from threefold.engine.dist.collectives import all_gather
from threefold.engine.dist.mesh import Group
from threefold.engine.dist.shard_placement import Placement, Range, even_range
from threefold.findings import Finding, FindingsError


@contextmanager
def fake_process_group(rank: int, size: int) -> Iterator[None]:
    """Make the default process group that of a job of `size` ranks, and this process its rank `rank`."""
    if dist.is_initialized():
        problem = "this process is a rank of a real job already"
        finding = Finding(
            rule="rehearsal-is-alone", at="dry-run", problem=problem, advice="rehearse in another process"
        )
        raise FindingsError([finding])
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with _lazy_fsdp_chunks(), compute_peer_placements():
            yield
    finally:
        dist.destroy_process_group()


class _LazyChunks:
    """The result of `torch.chunk`, padded with empty chunks, each of which is made only when it is indexed."""

    def __init__(self, x: Tensor, num_chunks: int, dim: int) -> None:
        self.x, self.num_chunks, self.dim = x, num_chunks, dim
        self.chunk_size = -(-x.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self.num_chunks

    def __getitem__(self, index: int) -> Tensor:
        length = self.x.size(self.dim)
        first = min(index % self.num_chunks * self.chunk_size, length)
        return self.x.narrow(self.dim, first, min(self.chunk_size, length - first))


@contextmanager
def _lazy_fsdp_chunks() -> Iterator[None]:
    """`fully_shard` chunks every parameter into one view a rank, and uses two of them: slow with thousands of ranks."""
    name = "_chunk_with_empty"
    before: Any = getattr(fsdp_param, name)
    setattr(fsdp_param, name, _LazyChunks)
    try:
        yield
    finally:
        setattr(fsdp_param, name, before)


class _Stream(torch.cpu.Stream):
    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]
        return torch.cpu.Event()


class _MetaDeviceModule:
    """Stands in for `torch.meta`: the streams of `torch.cpu`, which do nothing."""

    Stream = _Stream

    def current_device(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@contextmanager
def fsdp_on_meta() -> Iterator[None]:
    """Let torch's FSDP run on meta tensors: it wants streams of the device, and refuses weights without memory."""
    with (
        mock.patch.object(torch, "meta", _MetaDeviceModule(), create=True),
        mock.patch.object(torch.accelerator, "current_stream", torch.cpu.current_stream),
        mock.patch.object(FSDPParamGroup, "_validate_no_meta_params", return_value=None),
    ):
        yield


@contextmanager
def single_threaded() -> Iterator[None]:
    """Meta tensors compute nothing, so that more threads would only contend."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def computed_placements(
    group: Group, placements: dict[str, Placement], owned: Container[str], device: torch.device
) -> list[list[ShardInfo]]:
    """The answers of all ranks of the group, by rank and then by matrix.

    Another rank owns a part of a matrix if this rank does, or if ranks hold replicas of it and share it among them.
    """
    # The engine gathers these answers, and the call is counted although its result is computed.
    mine = torch.empty(len(placements), full_matrices.INFO_WORDS, dtype=torch.long, device=device)
    all_gather(mine.new_empty(group.size * len(mine), full_matrices.INFO_WORDS), mine, group).wait()
    owns = {name: name in owned or placement.tp_replicas > 1 for name, placement in placements.items()}
    return [
        [(peer_ranges(placement, group, rank), owns[name]) for name, placement in placements.items()]
        for rank in range(group.size)
    ]


def peer_ranges(placement: Placement, group: Group, rank: int) -> Ranges:
    """The ranges of the shard that rank `rank` of the group holds, given the placement of this rank's shard."""
    dims = zip(placement.shape, placement.ranges, strict=True)
    part, num_parts = rank // placement.tp_replicas, group.size // placement.tp_replicas
    ranges = [
        local if local == ((0, size),) else _equal_ranges(size, len(local), part, num_parts) for size, local in dims
    ]
    if "edp" in placement.replica_axes:  # ranks of etp hold slices of the same experts
        ranges[0] = placement.ranges[0]
    return tuple(ranges)


def _equal_ranges(size: int, num_stacked: int, part: int, num_parts: int) -> tuple[Range, ...]:
    """Part `part` of each of `num_stacked` matrices that are stacked along a dim of `size`."""
    width = size // num_stacked
    start, stop = even_range(width, part, num_parts)
    return tuple((n * width + start, n * width + stop) for n in range(num_stacked))


@contextmanager
def compute_peer_placements() -> Iterator[None]:
    """Replace the exchange of placements between ranks for the time of the block."""
    with mock.patch.object(full_matrices, full_matrices.exchange_shard_info.__name__, computed_placements):
        yield
