"""Mutations: ways to break the engine that the oracle must notice, and the tools to write one.

Functions in `mutations_*.py` register themselves with `@breaks(case)`; `test_mutations.py` runs each of them. A
mutation runs inside a forked rank, so that nothing need be restored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from threefold.engine.data_parallel.buckets import Bucket
from threefold.engine.dist.collectives import PendingCollective


@dataclass(frozen=True)
class Mutation:
    """One way to break the engine."""

    name: str
    case: str  # a case of `oracle_layouts.py` that uses what is broken
    mutate: Callable[[], None]
    often: bool  # whether the default suite runs it; the slow suite runs all
    error: str | None  # a pattern of the error of a rank that fails before it gets a wrong number


MUTATIONS: list[Mutation] = []


def breaks(case: str, often: bool = False, error: str | None = None) -> Callable[[Callable[[], None]], None]:
    """Register a function as a mutation that the oracle must notice in `case`."""

    def register(mutate: Callable[[], None]) -> None:
        MUTATIONS.append(Mutation(mutate.__name__.replace("_", " "), case, mutate, often, error))

    return register


def replace_attribute(owner: Any, name: str, new: Any) -> Any:
    """Replace an attribute of a module or class; returns the old one."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


def wrap_attribute(owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Replace a function by `new`, which gets the old function as its first argument."""
    old = getattr(owner, name)
    setattr(owner, name, lambda *args, **more: new(old, *args, **more))


def local_chunk(x: Tensor, group: Any, dim: int) -> Tensor:
    """This rank's part of a tensor, with no sum over ranks."""
    return x.chunk(group.size, dim)[group.rank].contiguous()


def skip_reduction(axis: str) -> None:
    """Make the buckets of groups along `axis` keep the gradients of this rank alone."""

    def start(old: Callable[..., None], bucket: Bucket) -> None:
        if axis in bucket.group.name.split(" x "):
            bucket.reducing = PendingCollective.completed()
        else:
            old(bucket)

    wrap_attribute(Bucket, "start_reduce", start)


def completed_call(*args: Any, **more: Any) -> PendingCollective:
    """A collective that does nothing."""
    return PendingCollective.completed()
