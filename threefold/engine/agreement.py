"""How far the ranks of a layout are from one rank, and whether what they sent home says anything about it."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from threefold.layout.degrees import AXES
from threefold.plan.plan import Plan

Pieces = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]  # name, whole shape, offsets, values


@dataclass
class Observed:
    """What one rank saw."""

    losses: list[dict[str, float]] = field(default_factory=list)  # of each step, by name
    norms: list[float] = field(default_factory=list)
    skipped: int = 0  # steps that changed nothing
    gradients: Pieces = field(default_factory=list)  # of the first step, before clipping; what this rank owns
    weights: Pieces = field(default_factory=list)  # behind the last step; all this rank holds
    states: Pieces = field(default_factory=list)  # of the optimizer, behind the last step; what this rank owns
    biases: dict[str, Tensor] = field(default_factory=dict)
    near_ties: int = 0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # collectives by group and operation


@dataclass(frozen=True)
class Comparison:
    """Largest relative differences to one rank; `worst` names the parameter of the gradient's."""

    loss: float  # of every loss, of every step, on every rank
    norm: float
    gradient: float
    weight: float
    state: float
    bias: float
    worst: str
    near_ties: int
    num_parameters: int  # whose gradients were compared
    steps: tuple[tuple[float, float], ...]  # cross entropy on one rank and on the layout
    idle: tuple[str, ...]  # gradients and biases that are zero on one rank: agreement there says little
    problems: tuple[str, ...]  # why the numbers above would mean nothing

    @property
    def largest(self) -> float:
        differences = (self.loss, self.norm, self.gradient, self.weight, self.state, self.bias)
        return math.inf if self.problems else max(differences)


def judge(plan: Plan, alone: Observed, ranks: Sequence[Observed]) -> Comparison:
    """Differences relative to the largest element of the one-rank tensor."""
    problems = [f"{seen.skipped} steps changed nothing" for seen in (alone, *ranks) if seen.skipped]
    problems += [f"nothing travelled along {axis}" for axis in _unused(plan, ranks)]
    gradients = _assemble([alone.gradients])[0]
    by_name = dict(_differences("gradient", gradients, [seen.gradients for seen in ranks], problems))
    worst = max(by_name, key=lambda name: by_name[name], default="")
    states = _differences("state", _assemble([alone.states])[0], [seen.states for seen in ranks], problems)
    weights = _assemble([alone.weights])[0]
    if weights.keys() != gradients.keys():
        problems.append(f"no gradient of {sorted(weights.keys() ^ gradients.keys())}")
    _covered("weight", weights, [seen.weights for seen in ranks], problems, once=False)
    if alone.biases.keys() != {name for seen in ranks for name in seen.biases}:
        problems.append("router biases are missing")
    biases = [relative(value, alone.biases[name]) for seen in ranks for name, value in seen.biases.items()]
    idle = [name for name, value in (*gradients.items(), *alone.biases.items()) if not value.any()]
    return Comparison(
        loss=_most(_number_gaps(alone, seen) for seen in ranks),
        norm=_most(_gaps(alone.norms, seen.norms) for seen in ranks),
        gradient=by_name.get(worst, 0.0),
        weight=max(_copy_differences(weights, ranks), default=0.0),
        state=max((gap for _, gap in states), default=0.0),
        bias=max(biases, default=0.0),
        worst=worst,
        near_ties=sum(seen.near_ties for seen in (alone, *ranks)),
        num_parameters=len(by_name),
        steps=tuple((a["ce"], b["ce"]) for a, b in zip(alone.losses, ranks[0].losses, strict=True)),
        idle=tuple(sorted(idle)),
        problems=tuple(dict.fromkeys(problems)),
    )


def _unused(plan: Plan, ranks: Sequence[Observed]) -> Iterator[str]:
    """Axes of the layout that no collective of theirs ran on: then the layout was not what it says."""
    calls = {call for seen in ranks for call in seen.calls}
    reduced = {word for name, call in calls if call in ("reduce_scatter", "fsdp") for word in re.findall(r"\w+", name)}
    used = {name.partition(" ")[0] for name, call in calls if " x " not in name and call != "all_reduce"}
    used = (used - {"dp", "edp"}) | reduced.intersection({"dp", "edp"})
    for axis in AXES:
        if plan.layout.degree(axis) > 1 and axis not in used and (axis != "edp" or plan.model.is_moe):
            yield axis


def _most(gaps: Iterator[Iterator[float]]) -> float:
    return max((gap for each in gaps for gap in each), default=0.0)


def _number_gaps(alone: Observed, seen: Observed) -> Iterator[float]:
    for wanted, found in zip(alone.losses, seen.losses, strict=True):
        assert wanted.keys() == found.keys(), wanted.keys() ^ found.keys()
        yield from _gaps(list(wanted.values()), [found[name] for name in wanted])


def _gaps(wanted: Sequence[float], found: Sequence[float]) -> Iterator[float]:
    return (_finite(abs(a - b), abs(a)) for a, b in zip(wanted, found, strict=True))


def _differences(
    what: str, wanted: dict[str, Tensor], ranks: list[Pieces], problems: list[str]
) -> list[tuple[str, float]]:
    found = _covered(what, wanted, ranks, problems, once=True)
    return [(name, relative(found[name], value)) for name, value in wanted.items() if name in found]


def _covered(
    what: str, wanted: dict[str, Tensor], ranks: list[Pieces], problems: list[str], once: bool
) -> dict[str, Tensor]:
    """The pieces of all ranks together: every element of every tensor, and where it is owned, by one of them."""
    found, times = _assemble(ranks)
    if wanted.keys() != found.keys():
        problems.append(f"{what}: missing or unknown {sorted(wanted.keys() ^ found.keys())}")
    for name, count in times.items():
        if count.numel() and (int(count.min()) < 1 or (once and int(count.max()) > 1)):
            problems.append(f"{what} of {name}: elements on {int(count.min())} to {int(count.max())} ranks")
    return found


def _assemble(ranks: list[Pieces]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole tensors, and how many ranks sent each element."""
    whole_of: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for name, shape, offsets, values in (piece for rank in ranks for piece in rank):
        if name not in whole_of:
            whole_of[name] = torch.zeros(shape, dtype=values.dtype)
            times[name] = torch.zeros(shape, dtype=torch.int)
        at = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        whole_of[name][at] = values
        times[name][at] += 1
    return whole_of, times


def _copy_differences(wanted: dict[str, Tensor], ranks: Sequence[Observed]) -> Iterator[float]:
    """Every copy on every rank, not only the owner's."""
    for seen in ranks:
        for name, _, offsets, values in seen.weights:
            at = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            if values.numel() and name in wanted:
                yield _finite(float((values - wanted[name][at]).abs().max()), float(wanted[name].abs().max()))


def relative(found: Tensor, wanted: Tensor) -> float:
    """To the largest element; where one rank has nothing but zeros, the difference itself."""
    return _finite(float((found - wanted).abs().max()), float(wanted.abs().max())) if wanted.numel() else 0.0


def _finite(gap: float, size: float) -> float:
    """Infinite where there is no number: `max` would pass over it."""
    quotient = gap / (size or 1.0)
    return quotient if math.isfinite(quotient) else math.inf
