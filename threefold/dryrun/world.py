"""A rank among ranks that do not exist: its collectives return at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from threefold.dryrun.cuts import placements_by_arithmetic
from threefold.findings import Finding, FindingsError


@contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[None]:
    """The default group is that of a job of `size` ranks, of which this process is one."""
    if dist.is_initialized():
        problem = "this process is a rank of a real job already"
        finding = Finding(
            rule="rehearsal-is-alone", at="dry-run", problem=problem, advice="rehearse in another process"
        )
        raise FindingsError([finding])
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with _lazy_chunks(), placements_by_arithmetic():
            yield
    finally:
        dist.destroy_process_group()


class _Chunks:
    """What `torch.chunk` gives, padded with empty parts, but made when asked for."""

    def __init__(self, x: Tensor, count: int, dim: int) -> None:
        self.x, self.count, self.dim = x, count, dim
        self.step = -(-x.size(dim) // count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Tensor:
        length = self.x.size(self.dim)
        first = min(place % self.count * self.step, length)
        return self.x.narrow(self.dim, first, min(self.step, length - first))


@contextmanager
def _lazy_chunks() -> Iterator[None]:
    """`fully_shard` cuts every parameter into as many views as there are ranks, and uses two of them."""
    name = "_chunk_with_empty"
    before: Any = getattr(fsdp_param, name)
    setattr(fsdp_param, name, _Chunks)
    try:
        yield
    finally:
        setattr(fsdp_param, name, before)


class _Stream(torch.cpu.Stream):
    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]
        return torch.cpu.Event()


class _Streams:
    """The streams of the CPU, which do nothing, for a device that has none."""

    Stream = _Stream

    def current_device(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@contextmanager
def sharding_without_memory() -> Iterator[None]:
    """torch's FSDP asks the module of a device for streams, and wants weights that have memory."""
    with (
        mock.patch.object(torch, "meta", _Streams(), create=True),
        mock.patch.object(torch.accelerator, "current_stream", torch.cpu.current_stream),
        mock.patch.object(FSDPParamGroup, "_validate_no_meta_params", return_value=None),
    ):
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Fake tensors compute nothing: more threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
