"""Ways to break the engine: what a mutation is, and the tools to make one.

A mutation runs inside a forked rank, so that nothing need be put back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from threefold.engine.shard.buckets import Bucket
from threefold.engine.shard.collectives import Pending


@dataclass(frozen=True)
class Mutation:
    name: str
    case: str  # a layout that uses what is broken
    mutate: Callable[[], None]
    often: bool
    error: str | None  # what a rank says where it does not get as far as a wrong number


MUTATIONS: list[Mutation] = []


def breaks(case: str, often: bool = False, error: str | None = None) -> Callable[[Callable[[], None]], None]:
    def register(mutate: Callable[[], None]) -> None:
        MUTATIONS.append(Mutation(mutate.__name__.replace("_", " "), case, mutate, often, error))

    return register


def put(owner: Any, name: str, new: Any) -> Any:
    """In place of what is there; returns that."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


def wrap(owner: Any, name: str, new: Callable[..., Any]) -> None:
    """`new` gets the old one first."""
    old = getattr(owner, name)
    setattr(owner, name, lambda *args, **more: new(old, *args, **more))


def own_share(x: Tensor, group: Any, dim: int) -> Tensor:
    return x.chunk(group.size, dim)[group.rank].contiguous()


def reduces_nothing(word: str) -> None:
    """Buckets of groups that `word` names keep what this rank has."""

    def start(old: Callable[..., None], bucket: Bucket) -> None:
        if word in bucket.group.name.split(" x "):
            bucket.reducing = Pending(None, None, [])
        else:
            old(bucket)

    wrap(Bucket, "start_reduce", start)


def nothing(*args: Any, **more: Any) -> Pending:
    return Pending(None, None, [])
