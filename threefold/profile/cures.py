"""What to change for the wall that was measured: the documents' cures in their order, with predicted gain and findings.

With a plan, each cure is a change of its fields; the cost model prices it, and the rules say what it would break. Of
changes to the same fields the best one that breaks nothing is named. Without a plan a cure is words alone. `analyse.py`
calls `cures`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from threefold.cost.estimate import gain
from threefold.cost.format_support import can_split_masters, low_precisions
from threefold.cost.memory.by_stack import memory
from threefold.cost.memory_ladder import goes_with_mode, recomputable_modules
from threefold.findings import Changes, Finding, FindingsError
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.profile.measure import DeviceWalls
from threefold.rules.all import judge
from threefold.rules.layout.batch import can_be_priced
from threefold.rules.walls import remedies
from threefold.units import format_bytes

MIN_GAIN = -0.01  # a cure of a time wall that is predicted to lose more is none
MIN_EXPOSED = 0.02  # share of the exposed time from which an axis is worth a cure

# The documents' cures of each wall, in their order, for traces without a plan.
WORDS = {
    "memory": (
        "recompute selectively: norms and expert activations first, whole layers last",
        "train in FP8, and keep optimizer states in fewer bits",
        "offload optimizer states or activations to the host",
        "spread the layers over more pipeline stages, or balance the stages",
    ),
    "communication": (
        "overlap gradient reduction and parameter gathering with compute",
        "overlap the expert-parallel exchange with another microbatch, and delay weight gradients",
        "overlap tensor-parallel communication with its GEMMs",
        "use the platform's dispatcher: DeepEP on H100 and B200, HybridEP on NVL72",
        "place ranks so that the axis with most traffic stays inside NVLink; fewer TP ranks, a better pipeline layout",
    ),
    "host": (
        "capture CUDA graphs of attention, router and dispatch preprocessing",
        "collect garbage by hand between steps",
        "use a larger microbatch, so that a kernel works longer than its launch",
        "pin each rank to the cores next to its GPU",
    ),
    "compute": (
        "use grouped GEMMs and fused kernels for experts and permutation",
        "train in the platform's FP8 recipe",
        "give the dispatcher fewer multiprocessors",
    ),
    "unknown": (
        "annotate the program (NVTX or record_function), or record CPU operators and shapes, and profile again",
    ),
}
_WHY = {
    "knobs.grad_reduce_overlap": "overlap gradient reduction and parameter gathering with compute",
    "knobs.param_gather_overlap": "overlap parameter gathering with compute",
    "knobs.ep_overlap": "overlap the expert-parallel exchange with another microbatch",
    "knobs.delay_wgrad": "delay weight gradients, so that they hide more of the exchange",
    "knobs.tp_overlap": "overlap tensor-parallel communication with its GEMMs",
    "knobs.dispatcher": "use the platform's dispatcher",
    "knobs.cp_comm": "exchange keys and values another way",
    "layout.tp": "fewer tensor-parallel ranks",
    "layout.ep": "keep the expert-parallel exchange inside NVLink",
    "layout.pp": "spread the layers over more pipeline stages",
    "knobs.graphs": "capture CUDA graphs, so that one launch replays many kernels",
    "job.micro_batch": "a larger microbatch, so that a kernel works longer than its launch",
    "run.gc_every": "collect garbage by hand between steps (not priced: measure it)",
    "run.cores": "pin each rank to the cores next to its GPU (not priced: measure it)",
    "knobs.expert_fusion": "fuse the experts' kernels",
    "knobs.permute_fusion": "fuse the permutation of tokens",
    "knobs.precision": "train in the platform's low precision",
    "knobs.dispatch_sms": "give the dispatcher fewer multiprocessors",
    "knobs.recompute": "recompute selectively",
    "knobs.store_param_remainders": "keep only the lower halves of master weights",
    "knobs.optimizer_dtype": "keep optimizer states in fewer bits",
    "knobs.grad_dtype": "keep gradients in fewer bits",
    "knobs.optimizer_offload": "offload optimizer states to the host",
}
_UNPRICED = ("run.gc_every", "run.cores")
# The axes whose exposed time a field can shorten.
_AXES = {
    "knobs.grad_reduce_overlap": ("dp", "edp"),
    "knobs.param_gather_overlap": ("dp", "edp"),
    "knobs.ep_overlap": ("ep", "etp"),
    "knobs.delay_wgrad": ("ep", "etp"),
    "knobs.dispatcher": ("ep", "etp"),
    "layout.ep": ("ep", "etp"),
    "knobs.tp_overlap": ("tp", "etp"),
    "layout.tp": ("tp", "etp"),
    "knobs.cp_comm": ("cp",),
}


@dataclass(frozen=True, slots=True)
class Cure:
    """One change, why it helps, what the cost model predicts of it, and what rules would find about it."""

    changes: Mapping[str, Any]
    why: str
    predicted_gain: float | None  # of throughput; None where nothing was priced
    findings: tuple[Finding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        listed = [
            {"rule": one.rule, "severity": one.severity, "at": one.at, "problem": one.problem} for one in self.findings
        ]
        return {
            "set": dict(self.changes),
            "why": self.why,
            "predicted_gain": self.predicted_gain,
            "findings": listed,
        }


def cures(wall: str, walls: DeviceWalls, plan: Plan | None) -> list[Cure]:
    """The cures of a wall in the documents' order."""
    if plan is None or wall == "unknown":
        return [Cure({}, why, None) for why in WORDS[wall]]
    known = {(one.rule, one.at) for one in judge(plan)}
    best: dict[frozenset[str], Cure] = {}  # of changes to the same fields
    for changes in _ways(wall, plan):
        if wall == "communication" and not _helps_an_axis(changes, walls):
            continue
        cure = _tried(plan, changes, known, wall)
        fields = frozenset(changes)
        if cure is not None and (fields not in best or _is_better(cure, best[fields], wall)):
            best[fields] = cure
    return list(best.values()) or [Cure({}, why, None) for why in WORDS[wall]]


def _ways(wall: str, plan: Plan) -> Iterator[Changes]:
    if wall == "memory":
        yield from _for_memory(plan)
        return
    for changes in remedies(plan, wall):
        if "knobs.graphs" in changes and plan.chip.architecture == "cpu":
            continue
        if wall == "host" and "job.micro_batch" in changes and plan.run.gc_every == 0:
            yield {"run.gc_every": 50}
        yield dict(changes)
    if wall == "host" and plan.target == "threefold" and plan.run.cores is None:
        yield {"run.cores": "auto"}


def _for_memory(plan: Plan) -> Iterator[Changes]:
    """Selective recompute, low precision, offloading, then more pipeline stages."""
    knobs, layout = plan.knobs, plan.layout
    named: list[str] = [] if plan.full_recompute else list(knobs.recompute)
    for name in recomputable_modules(plan):
        if name not in named and goes_with_mode(plan, [name]) and not plan.full_recompute:
            named = [*named, name]
            yield {"knobs.recompute": named}
    for name in low_precisions(plan)[: not plan.low_precision]:
        yield {"knobs.precision": name}
    if can_split_masters(plan):
        yield {"knobs.store_param_remainders": True}
    if knobs.optimizer_dtype != "bf16":
        yield {"knobs.optimizer_dtype": "bf16"}
    if not knobs.optimizer_offload:
        yield {"knobs.optimizer_offload": 1.0}
    if layout.gpus % (2 * layout.pp) == 0:
        yield {"layout.pp": 2 * layout.pp, "layout.stages": None}


def _helps_an_axis(changes: Mapping[str, Any], walls: DeviceWalls) -> bool:
    """Whether the change shortens an axis that has exposed time. Time of unknown axes may be anybody's."""
    axes = {axis for path in changes for axis in _AXES.get(path, ())}
    exposed = walls.communication.exposed_seconds
    measured = {axis for axis, found in walls.by_axis.items() if found.exposed_seconds >= MIN_EXPOSED * exposed}
    return not axes or not measured or "unknown" in measured or bool(axes & measured)


def _tried(plan: Plan, changes: Changes, known: set[tuple[str, str]], wall: str) -> Cure | None:
    """The cure with its price and its new findings; None where it gives no plan or does not help."""
    stated = {path: value for path, value in changes.items() if value is not None or path in plan.stated}
    try:
        other = change(plan, stated)
    except FindingsError:
        return None
    new = tuple(one for one in judge(other) if (one.rule, one.at) not in known)
    why = next((_WHY[path] for path in stated if path in _WHY), "")
    priced = can_be_priced(plan) and can_be_priced(other) and bool(other.num_microbatches)
    predicted = None
    if priced and not any(path in _UNPRICED for path in stated):
        predicted = round(gain(plan, other), 4)
        if wall == "memory":
            freed = memory(plan).worst.device_bytes - memory(other).worst.device_bytes
            if freed <= 0.002 * plan.chip.memory_bytes:
                return None
            why = f"{why}: frees {format_bytes(freed)} by estimate"
        elif predicted < MIN_GAIN:
            return None
    return Cure(stated, why, predicted, new)


def _is_better(one: Cure, other: Cure, wall: str) -> bool:
    """Whether a change goes before an earlier one to the same fields: it breaks nothing where the other does, or both
    break nothing and it gains more. For memory the earlier one is the milder."""
    if one.findings or other.findings:
        return bool(other.findings) and not one.findings
    return wall != "memory" and (one.predicted_gain or 0.0) > (other.predicted_gain or 0.0)
