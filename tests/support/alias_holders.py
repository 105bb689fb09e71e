"""Finds what holds memory of tensors: objects whose attributes, or whose running generators, lead to an alias of it."""

import gc
from collections.abc import Iterable
from functools import partial
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

import torch
from torch import Tensor

from threefold.engine.optim.pending_updates import is_pending, without_waiting

_CONTAINERS = (dict, list, tuple, set, frozenset, zip, CellType, FunctionType, partial, type(iter([])))


def holders_of_aliases(tensors: Iterable[Tensor]) -> set[str]:
    """The classes (and generators) that hold a tensor with the memory of one of these that is pending, and that is not
    pending itself: such as `Bucket`."""
    with without_waiting():
        pending = {_memory(x).untyped_storage()._cdata for x in tensors if is_pending(x)}
        gc.collect()
        every = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
        put_away = {id(_memory(x)) for x in every if is_pending(x)}
        others = [x for x in every if not is_pending(x) and id(x) not in put_away and _has_memory(x)]
        aliases = [x for x in others if x.untyped_storage()._cdata in pending]
        del others
    return _holders(aliases, {id(every)})


def _memory(pending: Tensor) -> Tensor:
    memory: Tensor | None = pending._memory  # type: ignore[attr-defined]
    return pending if memory is None else memory


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def _holders(values: list[Any], seen: set[int]) -> set[str]:
    """The objects that refer to these values, directly or through containers and closures."""
    found: set[str] = set()
    while values:
        seen.add(id(values))
        referrers = gc.get_referrers(*values)
        seen.add(id(referrers))
        values = []
        for referrer in referrers:
            kind = type(referrer)
            if id(referrer) in seen or issubclass(kind, FrameType):  # of this search, or code that runs
                continue
            seen.add(id(referrer))
            if issubclass(kind, GeneratorType):
                found.add(referrer.gi_code.co_qualname)
            elif issubclass(kind, _CONTAINERS):
                values.append(referrer)
            else:
                found.add(kind.__qualname__)
    return found
