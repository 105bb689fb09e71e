"""Records every collective and message of one rank in order, with what the ranks of its group must agree on.

`rehearse_rank` makes a `CallRecorder` where the calls of all ranks will be compared (`dryrun/collective_match.py`). It
sits where a dispatched `c10d` operator would run, so it sees the calls of the engine, of torch's FSDP and of the
pipeline alike, on the communicator that they use. A recorded step is a `CallSequence`: the calls, and the order in
which the rank starts them and waits for them. For example, `events=(0, 1, ~0, ~1)` starts two calls before it waits.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.dryrun.tracking.allocation_origin import OriginTracker

_C10D = torch.ops.c10d
# Operator -> name, and the position of the tensor whose size all ranks of the group agree on.
_COLLECTIVES = {
    _C10D.allreduce_.default: ("all_reduce", 0),
    _C10D._allgather_base_.default: ("all_gather", 1),
    _C10D._reduce_scatter_base_.default: ("reduce_scatter", 1),
    _C10D.broadcast_.default: ("broadcast", 0),
}
_MESSAGES = {_C10D.send.default: True, _C10D.recv_.default: False}  # whether the operator sends
_ENGINE = "threefold/engine/"
_COLLECTIVE_WRAPPERS = (_ENGINE + "dist/collectives.py", _ENGINE + "schedule/p2p.py")


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor sent to one rank, or received from it."""

    is_send: bool
    peer: int  # global rank
    num_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call on a communicator. Calls of one communicator run in the order in which a rank starts them."""

    communicator: str  # the same text on all of its ranks
    ranks: tuple[int, ...]
    operation: str
    num_bytes: int | None  # of the tensor on this rank; None where ranks may differ
    dtype: str
    where: str  # phase, module and line of the engine
    sent: tuple[int, ...] = ()  # all_to_all: bytes to each rank of the group
    received: tuple[int, ...] = ()  # all_to_all: bytes from each rank of the group
    messages: tuple[Message, ...] = ()  # one message, or those of a batch, which progress together


@dataclass(frozen=True)
class CallSequence:
    """The calls of one rank. In `events`, i starts call i and ~i waits for it."""

    calls: tuple[RecordedCall, ...]
    events: tuple[int, ...]


class _RecordedWork(torch._C._distributed_c10d.FakeWork):
    """The handle of a call, which tells when somebody waits for the call."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self.on_wait = on_wait

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        self.on_wait()
        return True


@dataclass
class CallRecorder:
    """Makes the `CallSequence` of a rank while its step runs."""

    rank: int
    origins: OriginTracker
    _calls: list[RecordedCall] = field(default_factory=list)
    _events: list[int] = field(default_factory=list)
    _is_waited_for: set[int] = field(default_factory=set)
    _batch: list[Message] | None = None
    _works: list[_RecordedWork] = field(default_factory=list)  # held, because torch holds only their C++ parts

    def sequence(self) -> CallSequence:
        return CallSequence(tuple(self._calls), tuple(self._events))

    def record_operator(self, func: Any, args: tuple[Any, ...]) -> _RecordedWork:
        """Record a dispatched operator of c10d and return the handle of its call."""
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        if func in _MESSAGES:
            return self._record_message(func, args, group)
        ranks = tuple(dist.get_process_group_ranks(group))
        if func == _C10D.alltoall_base_.default:
            out, x, _, out_sizes, sizes = args[:5]
            sent, received = _bytes_by_rank(x, sizes, len(ranks)), _bytes_by_rank(out, out_sizes, len(ranks))
            return self._start(group.group_name, ranks, "all_to_all", None, x, sent=sent, received=received)
        name, argument = _COLLECTIVES.get(func, (str(func), 0))
        x = args[argument][0] if isinstance(args[argument], list) else args[argument]
        return self._start(group.group_name, ranks, name, x.numel() * x.element_size(), x)

    def record_dispatcher(self, operation: str, ranks: Sequence[int]) -> None:
        """Record a dispatch or combine of the DeepEP package. How much each rank sends depends on the routing."""
        self._start(f"deep_ep {tuple(ranks)}", tuple(ranks), operation, None, None).wait()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record batches of messages as one call, and the making of process groups, which all their ranks join."""
        start_batch, new_group = dist.batch_isend_irecv, dist.new_group

        def recorded_batch(ops: list[dist.P2POp]) -> list[Any]:
            self._batch = []
            works = start_batch(ops)
            group = ops[0].group or dist.group.WORLD
            assert group is not None
            ranks = tuple(dist.get_process_group_ranks(group))
            messages, self._batch = tuple(self._batch), None
            size = sum(message.num_bytes for message in messages)
            self._start(group.group_name, ranks, "send_recv", size, ops[0].tensor, messages=messages)
            return works

        def recorded_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
            made = new_group(ranks, *args, **kwargs)
            members = tuple(sorted(ranks)) if ranks is not None else tuple(range(dist.get_world_size()))
            self._start(f"store {members}", members, "new_group", None, None).wait()
            return made

        with mock.patch.multiple(dist, batch_isend_irecv=recorded_batch, new_group=recorded_group):
            yield

    def _record_message(self, func: Any, args: tuple[Any, ...], group: dist.ProcessGroup) -> _RecordedWork:
        x, peer = args[0][0], dist.get_process_group_ranks(group)[args[2]]
        message = Message(_MESSAGES[func], peer, x.numel() * x.element_size(), str(x.dtype))
        if self._batch is not None:  # its call is recorded when the batch is complete, and has the next number
            self._batch.append(message)
            return self._make_work(len(self._calls))
        # Outside of a batch NCCL gives each pair of ranks a communicator of its own.
        ranks = tuple(sorted((self.rank, peer)))
        operation = "send" if message.is_send else "recv"
        name = f"{group.group_name} {ranks}"
        return self._start(name, ranks, operation, message.num_bytes, x, messages=(message,))

    def _start(
        self,
        communicator: str,
        ranks: tuple[int, ...],
        operation: str,
        num_bytes: int | None,
        x: Tensor | None,
        **more: Any,
    ) -> _RecordedWork:
        dtype = "" if x is None else str(x.dtype).removeprefix("torch.")
        self._calls.append(RecordedCall(communicator, ranks, operation, num_bytes, dtype, self._where(), **more))
        self._events.append(len(self._calls) - 1)
        return self._make_work(len(self._calls) - 1)

    def _make_work(self, number: int) -> _RecordedWork:
        def on_wait() -> None:
            if number not in self._is_waited_for:
                self._is_waited_for.add(number)
                self._events.append(~number)

        self._works.append(_RecordedWork(on_wait))
        return self._works[-1]

    def _where(self) -> str:
        """The origin of a call, and the innermost line of the engine outside of its wrappers of collectives."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            path = frame.f_code.co_filename
            start = path.rfind(_ENGINE)
            if start >= 0 and not path.endswith(_COLLECTIVE_WRAPPERS):
                return f"{self.origins.current()}; {path[start:]}:{frame.f_lineno}"
            frame = frame.f_back
        return str(self.origins.current())


def _bytes_by_rank(x: Tensor, sizes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Bytes of the rows of each rank; without sizes all ranks have equally many rows."""
    row_bytes = torch.Size(x.shape[1:]).numel() * x.element_size()
    return tuple(size * row_bytes for size in sizes or [len(x) // num_ranks] * num_ranks)
