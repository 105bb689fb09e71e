"""The collectives of a step as they happen: axis, operation, bytes, count, and the link they cross.

The engine's own are told by `collectives.observed`, messages between pipeline ranks by the pipeline. Those that torch's
FSDP starts by itself are only seen as operators, and known by their process group.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from threefold.engine.mesh import Group, Mesh
from threefold.engine.pipeline.schedule import Pipeline
from threefold.engine.shard.collectives import Call

_C10D = torch.ops.c10d
# Of operators that FSDP starts: what they are called here, and where the tensor lies whose size tells the bytes.
_BY_FSDP = {
    _C10D._allgather_base_.default: ("all_gather", 1, lambda size: size - 1),
    _C10D._reduce_scatter_base_.default: ("reduce_scatter", 1, lambda size: (size - 1) / size),
    _C10D.allreduce_.default: ("all_reduce", 0, lambda size: 2 * (size - 1) / size),
}
_ALSO_OURS = {name for name, _, _ in _BY_FSDP.values()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One kind of collective in a step of one rank. `num_bytes`: what the rank sends to others in one call."""

    axis: str
    operation: str
    num_bytes: int
    count: int
    link: str  # "domain", or "network" where the group is wider than a fast domain

    def to_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "operation": self.operation,
            "bytes": self.num_bytes,
            "count": self.count,
            "link": self.link,
        }


class Ledger:
    """`times`: how often the microbatches that are run stand for those of a step; `behind_them`: they are over."""

    def __init__(self, domain: int, times: float = 1.0, behind_them: Callable[[], bool] = lambda: False) -> None:
        self.domain, self.times, self.behind_them = domain, times, behind_them
        self.counting = False
        self._experts: set[int] = set()
        self._counts: Counter[tuple[str, str, int, str]] = Counter()
        self._announced = 0

    def begin(self, mesh: Mesh) -> None:
        """From here on."""
        self.counting = True
        self._experts = set(mesh.group("edp").ranks) if mesh.layout.edp != mesh.layout.dp * mesh.layout.cp else set()

    def observe(self, call: Call) -> None:
        """An observer of the engine's collectives."""
        if call.operation in _ALSO_OURS:
            self._announced += 1
        if self.counting:
            once = self.behind_them() or _of_copies(call.group.name)
            self._add(call.group.name, call.operation, call.num_bytes, call.group.ranks, 1 if once else self.times)

    def watch(self, func: Any, args: tuple[Any, ...]) -> None:
        """A watcher of operators."""
        if func not in _BY_FSDP:
            return
        if self._announced:
            self._announced -= 1
        elif self.counting:
            operation, place, sent = _BY_FSDP[func]
            x = args[place][0] if isinstance(args[place], list) else args[place]
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            size = x.numel() * x.element_size()
            axis = "edp" if self._experts.issuperset(ranks) else "dp x cp"
            self._add(axis, operation, round(size * sent(len(ranks))), ranks, self.times)

    def travel(self, operation: str, num_bytes: int, ranks: Sequence[int]) -> None:
        """What a flex package carries."""
        if self.counting:
            self._add("ep", operation, num_bytes, ranks, self.times)

    def add_pipeline(self, pipeline: Pipeline, group: Group) -> None:
        for size, count in pipeline.traffic():
            self._add("pp", "send", size, group.ranks, count * self.times)

    def _add(self, axis: str, operation: str, size: int, ranks: Sequence[int], times: float) -> None:
        spread = len({rank // self.domain for rank in ranks}) > 1
        self._counts[axis, operation, size, "network" if spread else "domain"] += times  # type: ignore[assignment]

    def entries(self) -> list[Entry]:
        """The most bytes first."""
        found = [Entry(a, op, size, round(count), link) for (a, op, size, link), count in self._counts.items()]
        return sorted(found, key=lambda entry: (-entry.num_bytes * entry.count, entry.axis, entry.operation))


def _of_copies(axes: str) -> bool:
    """What copies of a weight reduce and gather happens once a step, also where it begins among the microbatches."""
    return axes == "world" or not {"dp", "edp"}.isdisjoint(axes.split(" x "))
