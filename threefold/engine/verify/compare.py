"""Compares results of a parallel layout with those of one rank, and reports when a comparison proves nothing.

`oracle.py` runs both and calls `compare_results`. Differences are relative to the largest element of the one-rank
tensor. A gradient that is zero by mathematics is only rounding on either side: it is compared with the largest gradient
of the model, and the weights and optimizer states that follow from it are not compared (`Comparison.vanishing`). A
small gradient is what is left of larger ones that cancel, with the rounding of those: it is compared with `SMALL` of
the largest. A comparison proves nothing for a tensor that no rank sent, an axis that no collective used, or a gradient
that is zero everywhere. `Comparison.problems` and `idle` name these.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from threefold.layout.degrees import AXES
from threefold.plan.plan import Plan

VANISHING = 1e-8  # of the largest gradient: below it a gradient in fp64 is rounding
SMALL = 1e-5  # of the largest gradient: below it rounding of 1e-16 of that is more than the 1e-10 that tests allow

# One rectangle of a tensor each: name, full shape, offsets in the full tensor, values.
ShardValues = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]


@dataclass
class RankResults:
    """Everything that one rank computed in a few steps, for the comparison."""

    losses: list[dict[str, float]] = field(default_factory=list)  # of each step, by name
    norms: list[float] = field(default_factory=list)  # gradient norms of each step
    skipped: int = 0  # steps that changed nothing
    gradients: ShardValues = field(default_factory=list)  # after the first step, before clipping; what this rank owns
    weights: ShardValues = field(default_factory=list)  # after the last step; all that this rank holds
    states: ShardValues = field(default_factory=list)  # of the optimizer, after the last step; what this rank owns
    biases: dict[str, Tensor] = field(default_factory=dict)  # buffers, such as router biases
    near_ties: int = 0  # choices of experts, and copies at the capacity limit, that a small change would turn
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # collectives by group and operation
    evaluation: dict[str, float] = field(default_factory=dict)  # losses after the first step, by validation set
    frozen: set[str] = field(default_factory=set)  # parameters that do not train
    moved: set[str] = field(default_factory=set)  # those of them whose weights changed all the same
    graphs: str = ""  # replays of CUDA graphs by scope, or why something ran eagerly; empty without graphs
    loss_scale: float = 1.0  # of fp16: with which the gradients of the last step were finite
    largest_cp: int = 1  # the largest CP degree of a microbatch with tokens, where each has its own (dynamic CP)


@dataclass(frozen=True)
class Comparison:
    """The largest relative differences to one rank, and what casts doubt on them."""

    loss: float  # of every loss, of every step and of the evaluation, on every rank
    norm: float
    gradient: float
    weight: float
    state: float
    bias: float
    worst: str  # the parameter with the largest difference of gradients
    near_ties: int
    num_parameters: int  # parameters whose gradients were compared
    steps: tuple[tuple[float, float], ...]  # cross entropy on one rank and on the layout
    vanishing: tuple[str, ...]  # parameters whose gradient is zero up to rounding
    idle: tuple[str, ...]  # gradients and biases that are zero on one rank: agreement there says little
    problems: tuple[str, ...]  # why the numbers above would mean nothing
    norms: tuple[tuple[float, float], ...] = ()  # of the gradients of each step on one rank and on the layout

    @property
    def largest(self) -> float:
        differences = (self.loss, self.norm, self.gradient, self.weight, self.state, self.bias)
        return math.inf if self.problems else max(differences)


def compare_results(
    plan: Plan,
    one_rank: RankResults,
    ranks: Sequence[RankResults],
    vanishing_below: float = VANISHING,
    small: float = SMALL,
) -> Comparison:
    """Compare the results of all ranks with those of one rank. Both bounds are for fp64; coarser dtypes need larger."""
    problems = [f"{rank.skipped} steps changed nothing" for rank in (one_rank, *ranks) if rank.skipped]
    # Half is rounding: a gradient just below the largest fp16 number on one rank may lie just above it on several.
    problems += [
        f"overflows until the loss scale is {rank.loss_scale:g}, on one rank {one_rank.loss_scale:g}"
        for rank in ranks
        if rank.loss_scale < one_rank.loss_scale / 2
    ]
    problems += [f"nothing traveled along {axis}" for axis in _unused_axes(plan, ranks)]
    problems += [f"frozen and changed: {sorted(rank.moved)}" for rank in (one_rank, *ranks) if rank.moved]
    gradients = _assemble([one_rank.gradients])[0]
    sizes = {name: float(value.abs().max()) for name, value in gradients.items() if value.numel()}
    largest = max(sizes.values(), default=0.0)
    vanishing = {name for name, size in sizes.items() if 0 < size < vanishing_below * largest}
    floors = {name: largest if name in vanishing else small * largest for name in sizes}
    by_name = dict(_differences("gradient", gradients, [rank.gradients for rank in ranks], problems, floors))
    worst = max(by_name, key=lambda name: by_name[name], default="")
    by_state = _differences("state", _assemble([one_rank.states])[0], [rank.states for rank in ranks], problems, {})
    states = [(name.partition(".")[2], gap) for name, gap in by_state]
    # Moments have the relative rounding of their gradient, so that their differences count for as much as its own.
    counts = {name: min(1.0, size / floors[name]) for name, size in sizes.items() if size}
    weights = _assemble([one_rank.weights])[0]
    if weights.keys() - one_rank.frozen != gradients.keys():
        problems.append(f"no gradient of {sorted((weights.keys() - one_rank.frozen) ^ gradients.keys())}")
    if one_rank.frozen != {name for rank in ranks for name in rank.frozen}:
        problems.append("other parameters are frozen than on one rank")
    _assemble_checked("weight", weights, [rank.weights for rank in ranks], problems, once=False)
    if one_rank.biases.keys() != {name for rank in ranks for name in rank.biases}:
        problems.append("router biases are missing")
    biases = [
        relative_difference(value, one_rank.biases[name]) for rank in ranks for name, value in rank.biases.items()
    ]
    idle = [name for name, value in (*gradients.items(), *one_rank.biases.items()) if not value.any()]
    return Comparison(
        loss=_largest_gap(_loss_gaps(one_rank, rank) for rank in ranks),
        norm=_largest_gap(_gaps(one_rank.norms, rank.norms) for rank in ranks),
        gradient=by_name.get(worst, 0.0),
        weight=max((gap for name, gap in _copy_differences(weights, ranks) if name not in vanishing), default=0.0),
        state=max((gap * counts.get(name, 1.0) for name, gap in states if name not in vanishing), default=0.0),
        bias=max(biases, default=0.0),
        worst=worst,
        near_ties=sum(rank.near_ties for rank in (one_rank, *ranks)),
        num_parameters=len(by_name),
        steps=tuple((a["ce"], b["ce"]) for a, b in zip(one_rank.losses, ranks[0].losses, strict=True)),
        vanishing=tuple(sorted(vanishing)),
        idle=tuple(sorted(idle)),
        problems=tuple(dict.fromkeys(problems)),
        norms=tuple(zip(one_rank.norms, ranks[0].norms, strict=True)),
    )


def _unused_axes(plan: Plan, ranks: Sequence[RankResults]) -> Iterator[str]:
    """Axes of the layout on which no collective ran: then the ranks did not run that layout."""
    calls = {call for rank in ranks for call in rank.calls}
    reduced = {word for name, call in calls if call in ("reduce_scatter", "fsdp") for word in re.findall(r"\w+", name)}
    used = {name.partition(" ")[0] for name, call in calls if " x " not in name and call != "all_reduce"}
    used = (used - {"dp", "edp"}) | reduced.intersection({"dp", "edp"})
    # Gradients of experts travel along edp, and all others along dp. Adapters may train one kind alone.
    is_expert = {".experts." in name for rank in ranks for name, *_ in rank.gradients}
    needed = {"edp": True in is_expert, "dp": False in is_expert}
    # Dynamic CP gives each microbatch a degree, which is 1 for all of them where documents are short.
    needed["cp"] = not plan.shards_dynamically or any(rank.largest_cp > 1 for rank in ranks)
    for axis in AXES:
        if plan.layout.degree(axis) > 1 and axis not in used and needed.get(axis, True):
            yield axis


def _largest_gap(gaps: Iterator[Iterator[float]]) -> float:
    return max((gap for of_rank in gaps for gap in of_rank), default=0.0)


def _loss_gaps(one_rank: RankResults, rank: RankResults) -> Iterator[float]:
    pairs = zip((*one_rank.losses, one_rank.evaluation), (*rank.losses, rank.evaluation), strict=True)
    for wanted, actual in pairs:
        assert wanted.keys() == actual.keys(), wanted.keys() ^ actual.keys()
        yield from _gaps(list(wanted.values()), [actual[name] for name in wanted])


def _gaps(wanted: Sequence[float], found: Sequence[float]) -> Iterator[float]:
    return (_finite(abs(a - b), abs(a)) for a, b in zip(wanted, found, strict=True))


def _differences(
    what: str, wanted: dict[str, Tensor], ranks: list[ShardValues], problems: list[str], floors: dict[str, float]
) -> list[tuple[str, float]]:
    """`floors`: what tensors are compared with that have no size of their own."""
    actual = _assemble_checked(what, wanted, ranks, problems, once=True)
    both = ((name, actual[name], value) for name, value in wanted.items() if name in actual)
    return [(name, relative_difference(here, value, floors.get(name, 0.0))) for name, here, value in both]


def _assemble_checked(
    what: str, wanted: dict[str, Tensor], ranks: list[ShardValues], problems: list[str], once: bool
) -> dict[str, Tensor]:
    """Full tensors from the values of all ranks. Elements that nobody sent, or with `once` sent twice, are problems."""
    assembled, times = _assemble(ranks)
    if wanted.keys() != assembled.keys():
        problems.append(f"{what}: missing or unknown {sorted(wanted.keys() ^ assembled.keys())}")
    for name, count in times.items():
        if count.numel() and (int(count.min()) < 1 or (once and int(count.max()) > 1)):
            problems.append(f"{what} of {name}: elements on {int(count.min())} to {int(count.max())} ranks")
    return assembled


def _assemble(ranks: list[ShardValues]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Full tensors, and how many ranks sent each element."""
    full: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for name, shape, offsets, values in (values for rank in ranks for values in rank):
        if name not in full:
            full[name] = torch.zeros(shape, dtype=values.dtype)
            times[name] = torch.zeros(shape, dtype=torch.int)
        at = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        full[name][at] = values
        times[name][at] += 1
    return full, times


def _copy_differences(wanted: dict[str, Tensor], ranks: Sequence[RankResults]) -> Iterator[tuple[str, float]]:
    """Names and differences of every copy of a weight on every rank, not only of the owner's."""
    for rank in ranks:
        for name, _, offsets, values in rank.weights:
            at = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            if values.numel() and name in wanted:
                yield name, _finite(float((values - wanted[name][at]).abs().max()), float(wanted[name].abs().max()))


def relative_difference(found: Tensor, wanted: Tensor, at_least: float = 0.0) -> float:
    """The largest difference relative to the largest element; absolute where one rank has only zeros."""
    size = max(at_least, float(wanted.abs().max())) if wanted.numel() else 0.0
    return _finite(float((found - wanted).abs().max()), size) if wanted.numel() else 0.0


def _finite(gap: float, size: float) -> float:
    """The quotient; infinite where it is NaN, which `max` would pass over."""
    quotient = gap / (size or 1.0)
    return quotient if math.isfinite(quotient) else math.inf
