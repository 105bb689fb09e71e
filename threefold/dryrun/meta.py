"""Operators on tensors without memory (`meta`), quickly: results of a kind are worked out once.

Most operators there are Python in torch, where a rehearsal would spend most of its time. Collectives have no version
for such tensors: each returns at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

META = torch.device("meta")
_NOT_KNOWN = object()
_UNSAID = {torch.ops.aten._unsafe_view.default}  # whose results share memory with an argument, against their schema
Shapes = list[tuple[torch.Size, tuple[int, ...], torch.dtype] | None]


class MetaOperators:
    """`stand_ins` take the place of operators."""

    def __init__(self, stand_ins: dict[Any, Callable[..., Any]]) -> None:
        self.stand_ins = stand_ins
        self._plain: dict[Any, bool] = {}
        self._known: dict[Any, tuple[bool, Shapes] | None] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "c10d":
            return _done(func, args)
        key = self._key(func, args, kwargs)
        known = self._known.get(key, _NOT_KNOWN) if key is not None else None
        if known is not None and known is not _NOT_KNOWN:
            return _made(*known)  # type: ignore[misc]
        out = self.stand_ins.get(func, func)(*args, **kwargs)
        if known is _NOT_KNOWN:
            self._known[key] = _shapes(out)
        return out

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """All that shapes depend on; None where results share memory with arguments, or are not only tensors."""
        plain = self._plain.get(func)
        if plain is None:
            plain = self._plain[func] = _is_plain(func)
        if not plain:
            return None
        try:
            key = (func, *map(_of, args), *((name, _of(value)) for name, value in kwargs.items()))
            hash(key)
        except TypeError:
            return None
        return key


def _is_plain(func: Any) -> bool:
    if func in _UNSAID:
        return False
    parts = [*func._schema.arguments, *func._schema.returns]
    return all(part.alias_info is None for part in parts) and func.namespace in ("aten", "threefold")


def _of(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A tensor on the CPU among them has values that may matter.
        return (value.shape, value.stride(), value.dtype) if value.is_meta else id(value)
    if isinstance(value, list | tuple):
        return tuple(map(_of, value))
    return type(value), value


def _shapes(out: Any) -> tuple[bool, Shapes] | None:
    single = isinstance(out, Tensor)
    parts = (out,) if single else out
    if not isinstance(parts, tuple | list) or isinstance(out, list):
        return None
    if not all(part is None or (isinstance(part, Tensor) and part.is_meta) for part in parts):
        return None
    return single, [None if part is None else (part.shape, part.stride(), part.dtype) for part in parts]


def _made(single: bool, shapes: Shapes) -> Any:
    made = [
        None if shape is None else torch.empty_strided(shape[0], shape[1], dtype=shape[2], device=META)
        for shape in shapes
    ]
    return made[0] if single else tuple(made)


def _done(func: Any, args: tuple[Any, ...]) -> Any:
    """A collective that is over before it began."""
    work = torch._C._distributed_c10d.FakeWork().boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _one_by_one(ops: list[dist.P2POp]) -> list[Any]:
    return [op.op(op.tensor, group=op.group, **{_PEER[op.op]: op.group_peer}) for op in ops]


_PEER = {dist.isend: "group_dst", dist.irecv: "group_src"}


@contextmanager
def messages_one_by_one() -> Iterator[None]:
    """torch asks the tensors' device how to send several at once; there is none to ask."""
    with mock.patch.object(dist, "batch_isend_irecv", _one_by_one):
        yield
