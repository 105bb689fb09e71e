"""One kind of collective of a training step, whichever stack runs it, and how such entries are merged into a ledger.

Those of data parallelism are here too, by formula, for both stacks.

An entry reads `Transfer(axis="ep", operation="dispatch", bytes=1.3e8, count=96.0, link="network")`: an average rank
calls it 96 times in a step and sends 130 MB each time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from threefold.cost.format_support import STATE_BYTES, gathered_weight_bytes
from threefold.cost.rank_params import rank_params, trained_params
from threefold.plan.plan import Plan
from threefold.spec.model import Layer


@dataclass(frozen=True, slots=True)
class Transfer:
    """One kind of collective in a step."""

    axis: str  # an axis, or the axes of a group: "dp x cp"
    operation: str
    bytes: float  # sent by a rank in one call
    count: float  # calls of an average rank in a step; stages differ, and so may ranks of one stage
    link: str  # "domain" (NVLink) or "network"

    @property
    def total_bytes(self) -> float:
        return self.bytes * self.count

    def to_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "operation": self.operation,
            "bytes": round(self.bytes),
            "count": self.count,
            "link": self.link,
        }


def merge_transfers(entries: Iterable[Transfer]) -> list[Transfer]:
    """Entries of one kind as one line, largest first. Entries that carry nothing are left out."""
    found: dict[tuple[str, str, float, str], float] = {}
    for entry in entries:
        if entry.bytes > 0 and entry.count > 0:
            key = (entry.axis, entry.operation, entry.bytes, entry.link)
            found[key] = found.get(key, 0.0) + entry.count
    lines = [Transfer(axis, op, size, count, link) for (axis, op, size, link), count in found.items()]
    return sorted(lines, key=lambda entry: -entry.total_bytes)


def count_layers(plan: Plan) -> Counter[tuple[Layer, str]]:
    """The number of layers of each kind and context-parallel communication type; MTP depths have the last layer's
    type."""
    layers = [*plan.model.layers, *plan.model.mtp_depth * plan.mtp]
    types = plan.knobs.cp_comm
    each = [types] * len(layers) if isinstance(types, str) else [*types, *[types[-1]] * len(layers)]
    return Counter(zip(layers, each[: len(layers)], strict=True))


def data_parallel_transfers(plan: Plan, num_microbatches: int) -> Iterator[Transfer]:
    """Gradients out and weights back: once per step under ZeRO-1, for every microbatch under FSDP."""
    layout, knobs = plan.layout, plan.knobs
    grad_bytes = STATE_BYTES[knobs.grad_dtype]
    weight_bytes = gathered_weight_bytes(plan)
    is_sharded = knobs.data_parallel != "zero1"
    copies = layout.replicate if is_sharded else 1
    trained = trained_params(plan)
    gathered = rank_params(plan) if is_sharded else trained
    for part, (axis, all_ranks) in enumerate((("dp", layout.dp * layout.cp), ("edp", layout.edp))):
        ranks = max(1, all_ranks // copies)
        others = (ranks - 1) / ranks
        link = plan.link("cp" if axis == "dp" and layout.dp == 1 else axis).link
        reduced, count = grad_bytes * trained[part] * others, num_microbatches
        yield Transfer(axis, "reduce_scatter", reduced, count if is_sharded else 1, link)
        yield Transfer(axis, "all_gather", weight_bytes * gathered[part] * others, 2 * count if is_sharded else 1, link)
        replicas = min(copies, all_ranks)
        between = 2 * grad_bytes * trained[part] / ranks * (replicas - 1) / replicas
        yield Transfer(axis, "all_reduce", between, 1, link)
