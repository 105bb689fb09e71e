"""Runs operators and collectives on meta tensors, and remembers the shapes of results.

torch implements most meta operators in Python, where a rehearsal would spend most of its time. `MetaOperators` runs an
operator once for each combination of arguments and then makes results from the remembered shapes. Collectives have no
meta version, so they complete at once and do nothing. `MemoryTracker` calls it for every operator of a rehearsal.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

META = torch.device("meta")
_NOT_SEEN = object()
# Operators whose results share memory with an argument although their schema does not say so.
_UNDECLARED_VIEWS = {torch.ops.aten._unsafe_view.default}
MakeWork = Callable[[Any, tuple[Any, ...]], Any]  # operator of c10d, its arguments -> the handle of the call
Shapes = list[tuple[torch.Size, tuple[int, ...], torch.dtype] | None]  # shape, stride and dtype of each result


class MetaOperators:
    """An operator runner for `MemoryTracker`."""

    def __init__(self, replacements: dict[Any, Callable[..., Any]], make_work: MakeWork | None = None) -> None:
        """Make a runner.

        Args:
            replacements: functions that run instead of the operators that are their keys.
            make_work: is told of every collective and returns the handle that somebody may wait for.
        """
        self.replacements = replacements
        self.make_work = make_work or _completed_work
        # By the operator's address, as operators live for ever: their hash and namespace are computed in Python.
        self._is_collective: dict[int, bool] = {}
        self._is_cacheable: dict[int, bool] = {}
        self._known_shapes: dict[Any, tuple[bool, Shapes] | None] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_collective = self._is_collective.get(id(func))
        if is_collective is None:
            is_collective = self._is_collective[id(func)] = func.namespace == "c10d"
        if is_collective:
            work = self.make_work(func, args).boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        key = self._cache_key(func, args, kwargs)
        known = self._known_shapes.get(key, _NOT_SEEN) if key is not None else None
        if known is not None and known is not _NOT_SEEN:
            return _make_results(*known)  # type: ignore[misc]
        out = self.replacements.get(func, func)(*args, **kwargs)
        if known is _NOT_SEEN:
            self._known_shapes[key] = _shapes_of(out)
        return out

    def _cache_key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Everything that the shapes of the results depend on; None if the operator cannot be cached."""
        is_cacheable = self._is_cacheable.get(id(func))
        if is_cacheable is None:
            is_cacheable = self._is_cacheable[id(func)] = _has_fresh_results(func)
        if not is_cacheable:
            return None
        try:
            key = (id(func), *map(_argument_key, args), *((n, _argument_key(value)) for n, value in kwargs.items()))
            hash(key)
        except TypeError:
            return None
        return key


def _has_fresh_results(func: Any) -> bool:
    """Whether no result of an operator shares memory with an argument."""
    if func in _UNDECLARED_VIEWS:
        return False
    parts = [*func._schema.arguments, *func._schema.returns]
    return all(part.alias_info is None for part in parts) and func.namespace in ("aten", "threefold")


def _argument_key(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError("a CPU tensor has values, and the shape of the result may depend on them")
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_argument_key, value))
    return type(value), value


def _shapes_of(out: Any) -> tuple[bool, Shapes] | None:
    """Whether the result is a single tensor, and its shapes; None if it holds anything but meta tensors."""
    is_single = isinstance(out, Tensor)
    parts = (out,) if is_single else out
    if not isinstance(parts, tuple | list) or isinstance(out, list):
        return None
    if not all(part is None or (isinstance(part, Tensor) and part.is_meta) for part in parts):
        return None
    return is_single, [None if part is None else (part.shape, part.stride(), part.dtype) for part in parts]


def _make_results(is_single: bool, shapes: Shapes) -> Any:
    made = [
        None if shape is None else torch.empty_strided(shape[0], shape[1], dtype=shape[2], device=META)
        for shape in shapes
    ]
    return made[0] if is_single else tuple(made)


def _completed_work(func: Any, args: tuple[Any, ...]) -> Any:
    return torch._C._distributed_c10d.FakeWork()


def _isend_irecv_unbatched(ops: list[dist.P2POp]) -> list[Any]:
    return [op.op(op.tensor, group=op.group, **{_PEER_ARGUMENT[op.op]: op.group_peer}) for op in ops]


_PEER_ARGUMENT = {dist.isend: "group_dst", dist.irecv: "group_src"}


@contextmanager
def unbatched_p2p() -> Iterator[None]:
    """Start the point-to-point messages of a batch one by one.

    torch asks the backend of the tensors' device to batch them, and the meta device has no backend.
    """
    with mock.patch.object(dist, "batch_isend_irecv", _isend_irecv_unbatched):
        yield
