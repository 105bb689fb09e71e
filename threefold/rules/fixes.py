"""Fixes that lead somewhere: `check` offers a fix only where the plan after it has no finding that it had not before.

A rule names ways to cure its finding, best first: `Finding.fix`, then `Finding.fixes`. Each is tried: the plan with the
way applied is judged again, without fixes. Where other fields must move along (a batch with DP, graph scopes with
recompute), the ways of the findings that turned up are added, and the fix moves all of them together. Where no way
holds, the finding keeps its advice and says what stood in the way.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice, tee
from typing import Any

from threefold.cost.estimate import gain
from threefold.cost.memory_ladder import price
from threefold.findings import Changes, Finding, FindingsError, Severity, as_overrides, in_order
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.base import PREDICTED, RULES, judge

MOST_WAYS = 12  # of one finding that are tried
MOST_WAYS_ALONG = 4  # of a finding that a way brought up
MOST_ALONG = 5  # findings whose ways are added to one way
MOST_TRIALS = 150  # plans judged for the fixes of one check
WORTH = 0.002  # predicted gain from which a cure of a wall is named
MOST_REPAIRS = 60
TIME_WALLS = ("host-wall", "communication-wall", "compute-wall")
PRICED = PREDICTED | {"memory-wall", "states-fit-memory"}  # rules whose fixes are told with bytes and time
# Fields that decide what is learned, or on what.
_RESULT = ("model", "cluster", "job.seq_len", "knobs.precision", "knobs.optimizer_dtype", "knobs.grad_dtype")
# Fields follow from those before them: a wrong degree is corrected before the batch is moved for it.
_FOLLOWS = ("model", "layout", "cluster", "job", "knobs", "stack")


def check(plan: Plan, target: str | None = None, notes: bool = True) -> list[Finding]:
    """Every finding about a plan at once, errors first, each with a fix that holds where there is one."""
    plan = plan if target in (None, plan.target) else replace(plan, target=target)
    return with_fixes(plan, judge(plan, notes))


def with_fixes(plan: Plan, findings: list[Finding], leave_out: Collection[str] = ()) -> list[Finding]:
    """The findings with fixes that were tried. What parsing found may be among them."""
    trials = Trials(plan, findings, leave_out=leave_out)
    offered = [trials.with_gains(one) if one.rule in TIME_WALLS else trials.with_fix(one) for one in findings]
    return in_order(one for one in offered if one is not None and (one.fix or not _is_offer(one)))


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan with some fields changed, what rules find about it, and which of that is new."""

    plan: Plan
    findings: list[Finding]
    new: list[Finding]

    def count(self, key: tuple[str, str]) -> int:
        return sum(_key(finding) == key for finding in self.findings)


class Trials:
    """Plans near one plan, judged to see which changes bring nothing new. A change is tried once."""

    def __init__(
        self, plan: Plan, findings: list[Finding], sees_offers: bool = True, leave_out: Collection[str] = ()
    ) -> None:
        """`sees_offers`: whether an offer counts as new only where its own fix holds, which takes trials of its own.
        Rules named in `leave_out` do not judge the trials."""
        self.plan, self.findings, self.sees_offers, self.leave_out = plan, findings, sees_offers, leave_out
        self.known = {_key(finding) for finding in findings}
        self._left = MOST_TRIALS
        self._ways_left: dict[int, Iterator[Mapping[str, Any]]] = {}  # of findings that are held here, by identity
        self._tried: dict[str, Trial | None] = {}

    def with_fix(self, finding: Finding) -> Finding:
        """The finding with the first of its ways that holds, or with what stands in the way of the best one."""
        fix, stuck = self._first_that_holds(finding, self._ways(finding))
        if fix is None and finding.resort:
            fix, _ = self._first_that_holds(finding, [dict(finding.resort)])
        advice = [finding.advice]
        if fix and finding.rule in PRICED:
            advice.insert(0, price(self.plan, fix))
        elif fix is None:
            others = finding.otherwise() if finding.otherwise else ""
            advice = [finding.advice.removeprefix("or "), others, stuck]
            advice = advice if any(advice) else ["mend what else is found first, and check again"]
        text = "; ".join(filter(None, advice))
        return replace(finding, fix=fix, advice=text, fixes=(), resort=None, otherwise=None)

    def with_gains(self, finding: Finding) -> Finding | None:
        """A wall with the cures that are legal here and predicted to gain, in the documents' order; None where there is
        neither a cure nor an advice."""
        found: dict[frozenset[str], tuple[Changes, float]] = {}  # of ways that change the same fields, the best
        for way in self._ways(finding):
            trial, fields = self._try(way), frozenset(way)
            if trial is None or trial.new:
                continue
            better = gain(self.plan, trial.plan)
            if better > max(WORTH, found[fields][1] if fields in found else 0.0):
                found[fields] = way, better
        if not found:
            return replace(finding, fixes=()) if finding.advice else None
        (fix, best), *others = found.values()
        said = [f"predicted {best:+.1%}", *(f"or {as_overrides(way)} {better:+.1%}" for way, better in others)]
        advice = "; ".join(filter(None, [*said, finding.advice]))
        return replace(finding, fix=fix, advice=advice, fixes=())

    def _first_that_holds(self, finding: Finding, ways: Iterable[Changes]) -> tuple[Changes | None, str]:
        """A fix, or what stood in the way of the best one."""
        stuck, tried = "", list[Changes]()
        for way in islice(ways, MOST_WAYS):
            trial = self._try(way)
            if trial is None:
                continue
            if not trial.new and self._cures(finding, trial):
                return way, ""
            tried.append(way)
        for way in tried[:MOST_WAYS_ALONG] if finding.resort else tried:
            along, obstacle = self._with_what_moves_along(way, finding.severity)
            if obstacle is None and self._cures(finding, self._try(along)):
                return along, ""
            if obstacle is not None and not stuck:
                stuck = f"{as_overrides(along)} would bring {obstacle.rule}: {obstacle.problem}"
        return None, stuck

    def _with_what_moves_along(self, way: Changes, severity: Severity) -> tuple[Changes, Finding | None]:
        """The way with the ways of the findings that it brings up, until it brings up none; else one that has no way.

        For a warning nothing moves along that changes what is learned.
        """
        kept = _RESULT if severity != "error" else ()
        changes, first = dict(way), None
        for _ in range(MOST_ALONG):
            trial = self._try(changes)
            if trial is None or not trial.new:
                return changes, None
            first = min(trial.new, key=_depth)
            for more in chain(islice(self._ways(first), MOST_WAYS_ALONG), [dict(first.resort or {})]):
                undoes = any(_undoes(path, changes[path], v) for path, v in more.items() if path in changes)
                undoes = undoes or any(path.startswith(kept) for path in more)
                after = None if undoes else self._try({**changes, **more})
                if after is not None and not after.count(_key(first)):
                    changes = {**changes, **more}
                    break
            else:
                break
        return changes, first

    def _ways(self, finding: Finding) -> Iterator[Changes]:
        """The ways of a finding. A rule's need not put back to its default what was never stated."""
        left = self._ways_left.get(id(finding)) or chain([finding.fix or {}], finding.fixes)
        self._ways_left[id(finding)], ways = tee(left)  # what a generator has found is kept for the next time
        for way in ways:
            stated = {path: v for path, v in way.items() if v is not None or path in self.plan.stated}
            changes = stated if finding.rule in RULES else dict(way)
            if changes:
                yield changes

    def _try(self, changes: Mapping[str, Any]) -> Trial | None:
        """None where the changes give no plan, or too many were tried already."""
        key = as_overrides(dict(sorted(changes.items())))
        if key not in self._tried:
            self._tried[key] = self._judged(changes)
        return self._tried[key]

    def _judged(self, changes: Mapping[str, Any]) -> Trial | None:
        if self._left <= 0:
            return None
        self._left -= 1
        try:
            other = change(self.plan, changes)
        except FindingsError:
            return None
        findings = judge(other, leave_out=self.leave_out)
        return Trial(other, findings, self._new(other, findings))

    def _new(self, other: Plan, findings: list[Finding]) -> list[Finding]:
        """What the other plan has that this one had not. Nothing is said of an offer whose fix does not hold."""
        new = [finding for finding in findings if _key(finding) not in self.known]
        if self.sees_offers and new and all(_is_offer(finding) for finding in new):
            there = Trials(other, findings, sees_offers=False, leave_out=self.leave_out)
            new = [finding for finding in new if there.with_fix(finding).fix]
        return new

    def _cures(self, finding: Finding, trial: Trial | None) -> bool:
        """Whether fewer findings like this one are left. What parsing found is cured by a change that parses."""
        if trial is None or finding.rule not in RULES:
            return trial is not None
        return trial.count(_key(finding)) < sum(_key(one) == _key(finding) for one in self.findings)


def _is_offer(finding: Finding) -> bool:
    """Whether its rule has nothing to say without a fix."""
    return finding.rule in RULES and RULES[finding.rule].needs_fix


def _key(finding: Finding) -> tuple[str, str]:
    """What makes two findings the same, whatever numbers they quote."""
    return finding.rule, finding.at


def _undoes(path: str, value: Any, other: Any) -> bool:
    """Whether a change takes another one back. A batch may grow by whole multiples."""
    if path == "job.global_batch" and value and other and other % value == 0:
        return False
    return bool(value != other)


def _depth(finding: Finding) -> int:
    """How far down the order of fields a finding stands. Memory comes last: what fits depends on all the rest."""
    table = finding.at.partition(".")[0]
    return _FOLLOWS.index(table) if table in _FOLLOWS and finding.rule not in PRICED else len(_FOLLOWS)


def repair(
    plan: Plan,
    findings: Iterable[Finding] = (),
    severity: Severity = "error",
    leave_out: Collection[str] = (),
) -> tuple[Plan, list[Finding]]:
    """Apply fixes until no finding of this severity has one; returns the plan and what was applied.

    `findings` are those of parsing, whose fixes come first. Rules named in `leave_out` are not asked.
    """
    applied: list[Finding] = []
    left = list(findings)
    for _ in range(MOST_REPAIRS):
        found = with_fixes(plan, [*left, *judge(plan, leave_out=leave_out)], leave_out)
        curable = [finding for finding in found if finding.severity == severity and finding.fix]
        if not curable:
            break
        first = min(curable, key=_depth)
        plan = change(plan, first.fix or {})
        left = [finding for finding in left if _key(finding) != _key(first)]
        applied.append(first)
    return plan, applied
