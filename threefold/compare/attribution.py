"""Which differing field explains how much of a change that the cost model predicts between two plans.

`comparison.py` calls `attribute`. A group of fields is given its Shapley value: what moving it from A's value to B's
changes, averaged over all orders in which the groups can be moved, so that an interaction of two fields is shared by
both and the contributions add up to the whole change exactly. Up to `MOST_EXACT` groups all sets are priced; of more,
orders are drawn with a fixed seed, each together with its reverse.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from threefold.compare.field_groups import Group, Groups, PlansBetween
from threefold.plan.plan import Plan

MOST_EXACT = 8
NUM_ORDERS = 24  # drawn where not all sets are priced; as many reversed ones come with them

Terms = dict[str, float]
Price = Callable[[Plan], Terms]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one group of fields adds to the change from A to B."""

    fields: dict[str, tuple[Any, Any]]  # values in A and in B by path; None is the default
    terms: Terms  # by term of the price

    @property
    def amount(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class Attribution:
    """The predicted change from A to B by groups of fields, largest first."""

    before: Terms
    after: Terms
    contributions: tuple[Contribution, ...]
    is_exact: bool  # whether all sets of groups were priced

    @property
    def change(self) -> float:
        return sum(self.after.values()) - sum(self.before.values())


def attribute(between: PlansBetween, price: Price) -> Attribution:
    """Share the change of a price between the groups of differing fields."""
    prices: dict[Groups, Terms] = {}

    def priced(moved: Groups) -> Terms:
        if moved not in prices:
            prices[moved] = price(between.plan(moved))
        return prices[moved]

    inert = _inert_groups(between.groups, priced)
    groups = tuple(group for group in between.groups if group not in inert)
    is_exact = len(groups) <= MOST_EXACT
    values = {difference.path: (difference.a, difference.b) for difference in between.differences}
    shares: dict[Group, Terms] = {group: {} for group in between.groups}
    for group, weight, moved in _weighted_steps(groups) if is_exact else _drawn_steps(groups):
        _add(shares[group], priced(inert | moved | {group}), weight)
        _add(shares[group], priced(inert | moved), -weight)
    found = [Contribution({path: values[path] for path in group}, terms) for group, terms in shares.items()]
    found.sort(key=lambda each: (-abs(each.amount), sorted(each.fields)))
    return Attribution(priced(frozenset()), priced(frozenset(between.groups)), tuple(found), is_exact)


def _inert_groups(groups: tuple[Group, ...], priced: Callable[[Groups], Terms]) -> Groups:
    """Groups without effect on the price: at A, at B, and all together. They are moved first and contribute nothing."""
    none, everything = frozenset[Group](), frozenset(groups)
    inert = frozenset(
        group
        for group in groups
        if priced(frozenset({group})) == priced(none) and priced(everything - {group}) == priced(everything)
    )
    return inert if priced(inert) == priced(none) else none


def _add(terms: Terms, more: Mapping[str, float], weight: float) -> None:
    for name, value in more.items():
        terms[name] = terms.get(name, 0.0) + weight * value


def _weighted_steps(groups: tuple[Group, ...]) -> Iterator[tuple[Group, float, Groups]]:
    """A group, the weight of adding it, and the groups moved before: Shapley's formula over all sets."""
    count = len(groups)
    for group in groups:
        others = [each for each in groups if each != group]
        for size in range(count):
            weight = 1 / (count * math.comb(count - 1, size))
            for moved in combinations(others, size):
                yield group, weight, frozenset(moved)


def _drawn_steps(groups: tuple[Group, ...]) -> Iterator[tuple[Group, float, Groups]]:
    """The same for drawn orders. Each order's steps add up to the whole change, and so does their mean."""
    draw = random.Random(0)
    for _ in range(NUM_ORDERS):
        order = draw.sample(groups, len(groups))
        for ordered in (order, order[::-1]):
            for place, group in enumerate(ordered):
                yield group, 1 / (2 * NUM_ORDERS), frozenset(ordered[:place])
