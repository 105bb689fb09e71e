"""The fields in which two plans differ, in the smallest groups that can be moved from A's value to B's on their own.

A pipeline of eight stages with a stage string made for eight cannot get four stages and keep the string: rules refuse
the plan halfway, so the two fields form one group. `attribution.py` prices plans between A and B, `regress/` runs them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from threefold.findings import Finding, FindingsError
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.all import RULES
from threefold.search.legal import faults

MOST_ALONG = 3  # groups that are tried together to make a refused plan legal
MOST_COUNTED_OUT = 10  # groups whose sets are all tried for a refusal; of more, only sets of up to two and their rests

LAYOUT_RULES = "threefold.rules.layout."

Group = tuple[str, ...]  # paths of fields, sorted
Groups = frozenset[Group]


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field of a plan that differs; None is its default."""

    path: str
    a: Any
    b: Any


def differing_fields(a: Plan, b: Plan) -> list[FieldDifference]:
    """Every field that the two plans do not share, in order of paths."""
    old, new = dict(a.written), dict(b.written)
    return [
        FieldDifference(path, old.get(path), new.get(path))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    ]


def layout_faults(plan: Plan) -> list[Finding]:
    """Faults in the arithmetic of a layout: without it there is nothing to price. What a stack or chip cannot run can
    still be priced, as a step on the way from one plan to another."""
    return [fault for fault in faults(plan) if RULES[fault.rule].home.startswith(LAYOUT_RULES)]


class PlansBetween:
    """Plan A with some of the differing fields as in plan B. `faults_of` says what refuses a plan."""

    def __init__(self, a: Plan, b: Plan, faults_of: Callable[[Plan], Iterable[Finding]]) -> None:
        self.a, self.b = a, b
        self.differences = differing_fields(a, b)
        self._to_b = {each.path: each.b for each in self.differences}
        self._faults = faults_of
        self._accepted = {fault.rule for plan in (a, b) for fault in faults_of(plan)}
        self._is_legal: dict[frozenset[str], bool] = {}

    def plan(self, moved: Groups) -> Plan:
        """A with the fields of these groups as in B. Raises findings where they make no plan."""
        return change(self.a, {path: self._to_b[path] for group in moved for path in group})

    def is_legal(self, moved: Groups) -> bool:
        """Whether no rule refuses the plan that refuses neither A nor B."""
        key = frozenset(path for group in moved for path in group)
        if key not in self._is_legal:
            try:
                found = {fault.rule for fault in self._faults(self.plan(moved))}
            except FindingsError:
                found = {"no plan"}
            self._is_legal[key] = found <= self._accepted
        return self._is_legal[key]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The differing fields in groups such that no set of groups that was tried is refused."""
        groups: list[Group] = [(each.path,) for each in self.differences]
        while (refused := self._refused(groups)) is not None:
            merged = self._to_merge(groups, refused)
            groups = [group for group in groups if group not in merged]
            groups.append(tuple(sorted(path for group in merged for path in group)))
        return tuple(sorted(groups))

    def _refused(self, groups: list[Group]) -> Groups | None:
        """A set of groups that makes a refused plan, one of the smallest or largest."""
        most = len(groups) if len(groups) <= MOST_COUNTED_OUT else 2
        for size in range(1, min(most, len(groups) - 1) + 1):
            for some in combinations(groups, size):
                for moved in (frozenset(some), frozenset(groups) - frozenset(some)):
                    if not self.is_legal(moved):
                        return moved
        return None

    def _to_merge(self, groups: list[Group], refused: Groups) -> Groups:
        """The groups to make one: those that had to come along, and those without which nothing has to."""
        more = self.smallest(refused, frozenset(groups)) - refused
        less = refused - self.largest(refused)
        return more | less

    def smallest(self, moved: Groups, most: Groups) -> Groups:
        """A smallest legal set that holds all of `moved` and else only groups of `most`, which is legal itself."""
        others = sorted(most - moved)
        for size in range(min(MOST_ALONG, len(others)) + 1):
            for along in combinations(others, size):
                if self.is_legal(moved | frozenset(along)):
                    return moved | frozenset(along)
        return most

    def largest(self, moved: Groups) -> Groups:
        """A largest legal set of groups out of `moved`; none of them where more than a few are in the way."""
        for size in range(min(MOST_ALONG, len(moved)) + 1):
            for gone in combinations(sorted(moved), size):
                if self.is_legal(moved - frozenset(gone)):
                    return moved - frozenset(gone)
        return frozenset()
