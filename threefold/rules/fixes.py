"""Fixes that lead somewhere: `check` offers a fix only where the plan after it has no finding that it had not before.

A rule names ways to cure its finding, best first: `Finding.fix`, then `Finding.fixes`. Each is tried: the plan with the
way applied is judged again, without fixes. Where other fields must move along (a batch with DP, graph scopes with
recompute), the ways of the findings that turned up are added, and the fix moves all of them together: it drops those
that are not needed, and says of the others why they are. Where no way holds, the finding keeps its advice and says what
stood in the way.

Findings about memory and the wall that binds have no ways of their own: they carry the advice of the catalogue
(`remedies/advise.py`), which every verb gets from `advice`.

A way is a `fix` where it keeps what the plan means: the plan could not run, and nothing that is trained changes, or a
line without effect goes. Any other is a `suggestion`, which says what it changes.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice, tee
from typing import Any

from threefold.findings import Changes, Finding, Kind, Severity, as_overrides, in_order, shown
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.remedies.advise import MOST_ADVICE, Advice, advise, carried
from threefold.remedies.evidence import NOTHING_SEEN, Evidence
from threefold.remedies.trial import NOTHING_CHANGES, Trial, try_change
from threefold.rules.base import PREDICTED, RULES, judge
from threefold.rules.layout.batch import can_be_priced

MOST_WAYS = 12  # of one finding that are tried
MOST_WAYS_ALONG = 4  # of a finding that a way brought up
MOST_ALONG = 5  # findings whose ways are added to one way
MOST_TRIALS = 150  # plans judged for the fixes of one check
MOST_REPAIRS = 60
PRICED = PREDICTED | {"states-fit-memory"}  # rules that judge predicted memory
ADVISED = PRICED | {"memory-wall", "host-wall", "communication-wall", "compute-wall"}  # rules that carry the advice
# Fields that decide what is learned, or on what.
_RESULT = ("model", "cluster", "job.seq_len", "knobs.precision", "knobs.optimizer_dtype", "knobs.grad_dtype")
# Fields whose change is another training, whatever was wrong with them.
_TRAINED = ("model", "target", "cluster", "job", *_RESULT, "knobs.fp8", "knobs.master_weights", "knobs.router_dtype")
_NOT_TRAINED = ("job.micro_batch",)
# Fields follow from those before them: a wrong degree is corrected before the batch is moved for it.
_FOLLOWS = ("model", "layout", "cluster", "job", "knobs", "stack")


def check(plan: Plan, target: str | None = None, notes: bool = True) -> list[Finding]:
    """Every finding about a plan at once, errors first, each with a fix that holds where there is one."""
    plan = plan if target in (None, plan.target) else replace(plan, target=target)
    return with_fixes(plan, judge(plan, notes))


def with_fixes(plan: Plan, findings: list[Finding], leave_out: Collection[str] = ()) -> list[Finding]:
    """The findings with fixes that were tried. What parsing found may be among them."""
    trials = Trials(plan, findings, leave_out=leave_out)
    offered = [_advised(plan, one) if one.rule in ADVISED else trials.with_fix(one) for one in findings]
    return in_order(
        one for one in offered if one.fix or not (_is_offer(one) or (one.rule in ADVISED and not one.advice))
    )


def advice(plan: Plan, evidence: Evidence = NOTHING_SEEN, most: int = MOST_ADVICE) -> tuple[Advice, ...]:
    """What could help the plan, the first first: the same for every verb. `evidence` is what was seen of it."""
    return _first_advice(plan) if (evidence, most) == (NOTHING_SEEN, MOST_ADVICE) else _pieces(plan, evidence, most)


@lru_cache(maxsize=128)
def _first_advice(plan: Plan) -> tuple[Advice, ...]:
    return _pieces(plan, NOTHING_SEEN, MOST_ADVICE)


def _pieces(plan: Plan, evidence: Evidence, most: int) -> tuple[Advice, ...]:
    if not can_be_priced(plan) or not plan.num_microbatches:
        return ()
    return tuple(islice(advise(plan, Trials(plan, judge(plan)), evidence), most))


def _advised(plan: Plan, finding: Finding) -> Finding:
    """A finding about memory or the wall that binds, with the advice."""
    pieces = [piece for piece in advice(plan) if piece.changes]
    if not pieces:
        others = finding.otherwise() if finding.otherwise else ""
        return replace(finding, advice="; ".join(filter(None, (finding.advice, others))), otherwise=None)
    return carried(finding, pieces, _training_changes(plan, pieces[0].changes))


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
        self._found: dict[int, list[Finding]] = {}  # all that rules find about a trial, by its plan's identity

    def with_fix(self, finding: Finding) -> Finding:
        """The finding with the first of its ways that holds, or with what stands in the way of the best one."""
        if finding.kind == "did you mean":
            return self._meant(finding)
        fix, stuck = self._first_that_holds(finding, self._ways(finding))
        if fix is None and finding.resort:
            fix, _ = self._first_that_holds(finding, [dict(finding.resort)])
        advice: list[str] = [finding.advice]
        kind: Kind | None = None
        if fix:
            fix, along = self._needed(finding, fix)
            kind = finding.kind or _kind(self.plan, finding, fix)
            advice = [*(_effects(self.plan, fix) if kind == "suggestion" else ()), finding.advice, *along]
        else:
            others = finding.otherwise() if finding.otherwise else ""
            advice = [finding.advice.removeprefix("or "), others, stuck]
            advice = advice if any(advice) else ["mend what else is found first, and check again"]
        text = "; ".join(filter(None, advice))
        return replace(finding, fix=fix, kind=kind, advice=text, fixes=(), resort=None, otherwise=None)

    def _meant(self, finding: Finding) -> Finding:
        """The nearest name with which the plan has no further finding, else the nearest."""
        ways = list(self._ways(finding))
        tried = ((way, self._try(way)) for way in ways)
        fix = next((way for way, trial in tried if trial and trial.is_legal), ways[0] if ways else None)
        return replace(finding, fix=fix, fixes=())

    def _needed(self, finding: Finding, fix: Changes) -> tuple[Changes, list[str]]:
        """The fix without the fields that it can do without, and why each other one moves that the finding does not
        name."""
        said, reasons = f"{finding.at} {finding.problem} {finding.advice}", list[str]()
        for path in list(fix) if len(fix) > 1 and finding.rule in RULES else ():
            if path == finding.at or re.search(rf"\b{path.rpartition('.')[2]}\b", said):
                continue
            less = {other: value for other, value in fix.items() if other != path}
            trial = self._try(less)
            if trial is not None and trial.is_legal and self._cures(finding, trial):
                fix = less
            elif trial is not None and trial.findings:
                reasons.append(f"{path} moves along: else {trial.findings[0].rule}, {trial.findings[0].problem}")
            elif trial is not None:
                reasons.append(f"{path} moves along: else this stays as it is")
        return fix, reasons if len(fix) > 1 else []

    def _first_that_holds(self, finding: Finding, ways: Iterable[Changes]) -> tuple[Changes | None, str]:
        """A fix, or what stood in the way of the best one."""
        stuck, tried = "", list[Changes]()
        for way in islice(ways, MOST_WAYS):
            trial = self._try(way)
            if trial is None:
                continue
            if trial.is_legal and self._cures(finding, trial):
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
            if trial is None or trial.is_legal:
                return changes, None
            first = min(trial.findings, key=_depth)
            for more in chain(islice(self._ways(first), MOST_WAYS_ALONG), [dict(first.resort or {})]):
                undoes = any(_undoes(path, changes[path], v) for path, v in more.items() if path in changes)
                undoes = undoes or any(path.startswith(kept) for path in more)
                after = None if undoes else self._try({**changes, **more})
                if after is not None and not self._count(after, _key(first)):
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

    def trial(self, changes: Mapping[str, Any]) -> Trial | None:
        """The change tried, with what it brings; None where it gives no plan or too many were tried already."""
        return self._try(changes)

    def settled(self, changes: Mapping[str, Any]) -> Trial | None:
        """The change with the fields that must move along, where they make it hold."""
        along, obstacle = self._with_what_moves_along(dict(changes), "warning")
        return None if obstacle else self._try(along)

    def _try(self, changes: Mapping[str, Any]) -> Trial | None:
        """None where the changes give no plan, or too many were tried already."""
        key = as_overrides(dict(sorted(changes.items())))
        if key not in self._tried:
            self._left -= 1
            trial = try_change(self.plan, changes, self._judged) if self._left >= 0 else None
            self._tried[key] = trial if trial is not None and trial.plan is not None else None
        return self._tried[key]

    def _judged(self, other: Plan) -> list[Finding]:
        self._found[id(other)] = judge(other, leave_out=self.leave_out)
        return self._new(other, self._found[id(other)])

    def _count(self, trial: Trial, key: tuple[str, str]) -> int:
        """How many findings of a kind a trial has."""
        return sum(_key(finding) == key for finding in self._found[id(trial.plan)])

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
        return self._count(trial, _key(finding)) < sum(_key(one) == _key(finding) for one in self.findings)


def _kind(plan: Plan, finding: Finding, fix: Changes) -> Kind:
    """What the fix of a rule is, by what it changes."""
    if finding.severity == "note" or _trains(fix):
        return "suggestion"
    is_default = all(value in (None, FIELDS[path].default) for path, value in fix.items() if path in FIELDS)
    changes_nothing = is_default and _price(plan, fix) == NOTHING_CHANGES
    return "fix" if finding.severity == "error" or changes_nothing else "suggestion"


def _price(plan: Plan, fix: Changes) -> str:
    """What a fix gives and takes, in words; nothing where the plan before or after it has no price."""
    trial = try_change(plan, fix, lambda other: ())
    can_be = (
        can_be_priced(plan) and trial.plan is not None and can_be_priced(trial.plan) and trial.plan.num_microbatches
    )
    return trial.price if can_be else ""


def _trains(fix: Changes) -> list[str]:
    """The fields of a fix with which something else is trained."""
    return [path for path in fix if path.startswith(_TRAINED) and path not in _NOT_TRAINED]


def _effects(plan: Plan, fix: Changes) -> list[str]:
    """What a suggestion changes: bytes and time, and what is trained (`changes job.global_batch from 100 to 96`)."""
    price = _price(plan, fix)
    return [text for text in ("" if price == NOTHING_CHANGES else price, _training_changes(plan, fix)) if text]


def _training_changes(plan: Plan, fix: Changes) -> str:
    before = dict(plan.written)
    moved = [
        f"{path} from {shown(before.get(path, FIELDS[path].default))} to {shown(fix[path])}"
        for path in _trains(fix)
        if path in FIELDS
    ]
    return f"changes {', '.join(moved)}" if moved else ""


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
    severities: Sequence[Severity] = ("error",),
    leave_out: Collection[str] = (),
    kinds: Collection[Kind] = ("fix", "suggestion"),
) -> tuple[Plan, list[Finding]]:
    """Apply fixes of these severities and kinds until none is left; returns the plan and what was applied.

    `findings` are those of parsing, whose fixes come first. Rules named in `leave_out` are not asked.
    """
    applied: list[Finding] = []
    left = list(findings)
    for _ in range(MOST_REPAIRS):
        found = with_fixes(plan, [*left, *judge(plan, leave_out=leave_out)], leave_out)
        ready = [one for one in found if one.severity in severities and one.fix and one.fix_kind in kinds]
        if not ready:
            break
        first = min(ready, key=lambda one: (severities.index(one.severity), _depth(one)))
        plan = change(plan, first.fix or {})
        left = [finding for finding in left if _key(finding) != _key(first)]
        applied.append(first)
    return plan, applied
