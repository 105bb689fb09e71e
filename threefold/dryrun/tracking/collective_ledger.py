"""Counts the collectives of one rank in one step: axis, operation, bytes, number of calls, and the link they cross.

`rehearse_rank` feeds the ledger from four sources: the engine's collectives through `observe_collectives`, those that
torch's FSDP starts as dispatched operators, the traffic of the DeepEP stand-in, and the pipeline's messages. An entry
is `LedgerEntry("ep", "all_to_all", num_bytes=117440512, count=8, link="domain")`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from threefold.engine.dist.collectives import CollectiveCall
from threefold.engine.dist.mesh import Group, Mesh
from threefold.engine.schedule.pipeline import Pipeline

_C10D = torch.ops.c10d
# Operators that FSDP starts: our name, the position of the tensor argument, and group size -> bytes sent per byte of it
_FSDP_OPERATORS = {
    _C10D._allgather_base_.default: ("all_gather", 1, lambda size: size - 1),
    _C10D._reduce_scatter_base_.default: ("reduce_scatter", 1, lambda size: (size - 1) / size),
    _C10D.allreduce_.default: ("all_reduce", 0, lambda size: 2 * (size - 1) / size),
}
_FSDP_ADDRESSES = {id(func) for func in _FSDP_OPERATORS}
_ALSO_STARTED_BY_ENGINE = {name for name, _, _ in _FSDP_OPERATORS.values()}


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """All calls of one rank in one step that have the same axis, operation, size and link."""

    axis: str
    operation: str
    num_bytes: int  # sent to other ranks in one call
    count: int
    link: str  # "domain", or "network" where the group spans more than one NVLink domain

    def to_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "operation": self.operation,
            "bytes": self.num_bytes,
            "count": self.count,
            "link": self.link,
        }


class CollectiveLedger:
    """The collectives of one rank, scaled from the microbatches that were run to those of a whole step."""

    def __init__(
        self,
        domain_ranks: int,
        microbatch_factor: float = 1.0,
        microbatches_are_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make an empty ledger, which counts nothing before `start`.

        Args:
            domain_ranks: ranks of one NVLink domain.
            microbatch_factor: microbatches of a step for each microbatch that is run.
            microbatches_are_over: whether the step is past its microbatches; what follows happens once a step.
        """
        self.domain_ranks, self.microbatch_factor = domain_ranks, microbatch_factor
        self.microbatches_are_over = microbatches_are_over
        self.is_counting = False
        self._expert_data_ranks: set[int] = set()
        self._counts: Counter[tuple[str, str, int, str]] = Counter()
        self._num_announced = 0  # engine calls whose operator is still to be dispatched, and is no call of FSDP

    def start(self, mesh: Mesh) -> None:
        """Count from now on."""
        self.is_counting = True
        edp_differs = mesh.layout.edp != mesh.layout.dp * mesh.layout.cp
        self._expert_data_ranks = set(mesh.group("edp").ranks) if edp_differs else set()

    def record_call(self, call: CollectiveCall) -> None:
        """Count a collective that the engine starts. Passed to `observe_collectives`."""
        if call.operation in _ALSO_STARTED_BY_ENGINE:
            self._num_announced += 1
        if self.is_counting:
            once = self.microbatches_are_over() or _joins_replicas(call.group.name)
            factor = 1 if once else self.microbatch_factor
            self._add(call.group.name, call.operation, call.num_bytes, call.group.ranks, factor)

    def record_operator(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count a collective that FSDP starts. An observer of `MemoryTracker`."""
        if id(func) not in _FSDP_ADDRESSES:  # the hash of an operator is computed in Python, for every operator
            return
        if self._num_announced:
            self._num_announced -= 1
        elif self.is_counting:
            operation, argument, sent = _FSDP_OPERATORS[func]
            x = args[argument][0] if isinstance(args[argument], list) else args[argument]
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            size = x.numel() * x.element_size()
            axis = "edp" if self._expert_data_ranks.issuperset(ranks) else "dp x cp"
            self._add(axis, operation, round(size * sent(len(ranks))), ranks, self.microbatch_factor)

    def record_dispatcher(self, operation: str, num_bytes: int, ranks: Sequence[int]) -> None:
        """Count a dispatch or combine of the stand-in for the DeepEP package."""
        if self.is_counting:
            self._add("ep", operation, num_bytes, ranks, self.microbatch_factor)

    def record_pipeline(self, pipeline: Pipeline, group: Group) -> None:
        """Count the messages that this rank has sent to other pipeline stages."""
        for size, count in pipeline.traffic():
            self._add("pp", "send", size, group.ranks, count * self.microbatch_factor)

    def _add(self, axis: str, operation: str, size: int, ranks: Sequence[int], count: float) -> None:
        link = "network" if len({rank // self.domain_ranks for rank in ranks}) > 1 else "domain"
        self._counts[axis, operation, size, link] += count  # type: ignore[assignment]

    def entries(self) -> list[LedgerEntry]:
        """The entries, those with the most bytes in a step first."""
        found = [LedgerEntry(a, op, size, round(count), link) for (a, op, size, link), count in self._counts.items()]
        return sorted(found, key=lambda entry: (-entry.num_bytes * entry.count, entry.axis, entry.operation))


def _joins_replicas(axes: str) -> bool:
    """Whether a group joins data-parallel replicas.

    Such a group reduces gradients or gathers weights once a step, even if the call overlaps with a microbatch.
    """
    return axes == "world" or not {"dp", "edp"}.isdisjoint(axes.split(" x "))
