"""The hunt for the settings behind a regression between two plans; `threefold regress` calls `hunt`.

First plans A and B are run in turns until it is certain that B is slower or fails. Then delta debugging looks for a
smallest set of differing fields that shows at least half of the regression. With the fields of that set as in A, what
is left of B is tried: where it still shows a regression, there is another culprit, and the hunt goes on there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from threefold.compare.attribution import attribute
from threefold.compare.contract import label_of, value_or_default
from threefold.compare.field_groups import Group, Groups, PlansBetween, layout_faults
from threefold.compare.regress.trials import Round, Say, Trials
from threefold.compare.regress.verdicts import (
    EARLY,
    LEAST_ROUNDS,
    Verdict,
    count_failures,
    in_order,
    judge_failure,
    judge_time,
    log_ratios,
    ratio_of,
)
from threefold.compare.work import plan_differences, plan_unit, plan_work
from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import rates_of
from threefold.cost.time.step import step_time
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.search.legal import faults

MOST_CULPRITS = 5
MISSED = 0.05  # probability of missing a failure that comes and goes
MOST_REPEATS_OVER = 4  # runs of a plan without a failure, over the repeats asked for

Regression = Literal["none", "slower", "fails"]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What rounds of plan A and plan B say."""

    kind: Regression
    verdict: Verdict  # of B
    signature: str = ""  # how B fails


@dataclass(frozen=True, slots=True)
class Culprit:
    """A smallest set of fields that shows the regression."""

    fields: dict[str, tuple[Any, Any]]  # values in A and in B by path
    alone: Verdict  # plan A with only these fields as in B
    without: Verdict | None  # the other suspected fields as in B, these as in A; None where there are no others
    left_out: tuple[str, ...] = ()  # fields that had to stay as in A then, because rules refuse the plan otherwise

    def to_json(self) -> dict[str, Any]:
        return {
            "fields": {path: {"a": old, "b": new} for path, (old, new) in self.fields.items()},
            "alone": self.alone.to_json(),
            "without": self.without and self.without.to_json(),
            "left_out": list(self.left_out),
        }


@dataclass(frozen=True, slots=True)
class Hunted:
    """The result of a hunt."""

    baseline: Baseline
    unit: str  # per what times are compared
    culprits: tuple[Culprit, ...]
    num_fields: int
    num_rounds: int
    label: str  # whether the times could be accepted for training

    def to_json(self) -> dict[str, Any]:
        return {
            "regression": self.baseline.kind,
            "label": self.label,
            "failure": self.baseline.signature,
            "b": self.baseline.verdict.to_json(),
            "per": self.unit,
            "culprits": [culprit.to_json() for culprit in self.culprits],
            "num_fields": self.num_fields,
            "num_rounds": self.num_rounds,
        }


def hunt(a: Plan, b: Plan, trials: Trials, repeats: int, worse_by: float, say: Say, anyway: bool = False) -> Hunted:
    """Find the fields behind a regression from A to B of more than `worse_by`, a fraction. Raises findings."""
    between = PlansBetween(a, b, faults)
    if not between.differences:
        problem = "the two plans are the same"
        raise FindingsError([Finding(rule="work-is-comparable", at="B", problem=problem, advice="give two plans")])
    unit = plan_unit(a, b)

    def amount(plan: Plan) -> float:
        return plan_work(plan, unit)

    say(f"{len(between.differences)} fields differ; times are compared per {unit}")
    baseline = _baseline(a, b, trials, repeats, worse_by, amount)
    if baseline.kind == "slower" and not anyway:
        _check_same_work(a, b)
    culprits: list[Culprit] = []
    if baseline.kind != "none":
        judge = _Judge(between, trials, baseline, repeats, worse_by, amount, say)
        culprits = _culprits(between, *_likely_first(between, baseline), judge, say)
    return Hunted(baseline, unit, tuple(culprits), len(between.differences), trials.num_rounds, label_of(a, b))


def _check_same_work(a: Plan, b: Plan) -> None:
    advice = "make the two alike there; --anyway hunts on"
    unequal = [
        Finding(rule="work-is-comparable", at=at, problem=problem, advice=advice)
        for at, problem in plan_differences(a, b)
    ]
    if unequal:
        raise FindingsError(unequal)


def _baseline(
    a: Plan, b: Plan, trials: Trials, repeats: int, worse_by: float, amount: Callable[[Plan], float]
) -> Baseline:
    """Run A and B in turns until it is certain whether B is slower, or how it fails."""
    rounds: list[Round] = []
    for number in range(max(repeats, LEAST_ROUNDS)):
        rounds.append(trials.run_round("baseline", number, in_order(number, ("A", a), ("B", b))))
        _check_good(rounds)
        failures = count_failures([each["B"] for each in rounds])
        if failures and len(rounds) >= 2 and sum(failures.values()) == len(rounds):
            break
        logs = log_ratios(rounds, "B", amount(a) / amount(b))
        if not failures and len(logs) >= LEAST_ROUNDS:
            interval = ratio_of(logs, EARLY)[1]
            if interval and interval[0] > 1 + worse_by:  # no regression is said only after all rounds
                break
    failures = count_failures([each["B"] for each in rounds])
    if failures:
        signature = max(failures, key=lambda name: failures[name])
        return Baseline("fails", Verdict("bad", True, len(rounds), failures=failures), signature)
    if len(logs) < len(rounds):
        problem = "both plans run, and the command gives no time to compare them by"
        advice = 'let it print {"step_seconds": ...} as JSON, give it {run} as run folder, or use --metric elapsed'
        raise FindingsError([Finding(rule="enough-steps", at="command", problem=problem, advice=advice)])
    ratio, interval = ratio_of(logs)
    is_slower = interval is not None and interval[0] > 1 + worse_by
    is_certain = interval is not None and not interval[0] <= 1 + worse_by <= interval[1]
    verdict = Verdict("bad" if is_slower else "good", is_certain, len(rounds), ratio, interval)
    return Baseline("slower" if is_slower else "none", verdict)


def _check_good(rounds: list[Round]) -> None:
    """Raise where plan A fails: there must be something to fall back from."""
    if failures := count_failures([each["A"] for each in rounds]):
        problem = f"plan A is the good one, and the command fails on it: {', '.join(failures)}"
        advice = "look at the output in the folder's trials/; give the plan that works first, or a longer --limit"
        raise FindingsError([Finding(rule="good-plan-runs", at="A", problem=problem, advice=advice)])


class _Judge:
    """Answers whether a set of fields shows the regression, each set once."""

    def __init__(
        self,
        between: PlansBetween,
        trials: Trials,
        baseline: Baseline,
        repeats: int,
        worse_by: float,
        amount: Callable[[Plan], float],
        say: Say,
    ) -> None:
        self.between, self.trials, self.baseline = between, trials, baseline
        self.repeats, self.worse_by, self.amount, self.say = repeats, worse_by, amount, say
        self.target = baseline.verdict.ratio or 1.0  # the ratio of which half must be shown
        self.everything = frozenset((each.path,) for each in between.differences)
        self._known: dict[tuple[Groups, float], Verdict] = {}

    def half_of_it(self, moved: Groups) -> Verdict:
        """Whether at least half of the present regression is there."""
        return self._judge(moved, math.sqrt(self.target))

    def any_of_it(self, moved: Groups) -> Verdict:
        """Whether a regression is there that would have started the hunt."""
        return self._judge(moved, 1 + self.worse_by)

    def _judge(self, moved: Groups, threshold: float) -> Verdict:
        if moved == self.everything:
            return self.baseline.verdict
        key = (moved, threshold)
        if key not in self._known:
            self._known[key] = self._run(moved, threshold)
        return self._known[key]

    def _run(self, moved: Groups, threshold: float) -> Verdict:
        paths = sorted(path for group in moved for path in group)
        name, plan = "only " + " ".join(paths), self.between.plan(moved)
        self.say(f"plan C is A with {', '.join(paths)} as in B")
        if self.baseline.kind == "fails":
            verdict = judge_failure(self.trials, name, plan, self.baseline.signature, self._runs_without_failure())
        else:
            verdict = judge_time(self.trials, name, self.between.a, plan, threshold, self.repeats, self.amount)
        ratio = "" if verdict.ratio is None else f", {verdict.ratio:.3f} x the time of A"
        doubt = "" if verdict.is_certain else ", not certain"
        self.say(f"plan C is {verdict.answer}{ratio}{doubt}")
        return verdict

    def _runs_without_failure(self) -> int:
        """Runs after which a failure as frequent as in B would have been seen but for a small probability."""
        verdict = self.baseline.verdict
        often = (verdict.failures or {}).get(self.baseline.signature, 1) / verdict.rounds
        if often >= 1:
            return 1
        return min(MOST_REPEATS_OVER * self.repeats, math.ceil(math.log(MISSED) / math.log(1 - often)))


def _culprits(
    between: PlansBetween, suspects: Sequence[Group], guess: Groups, judge: _Judge, say: Say
) -> list[Culprit]:
    """Hunt among the suspects, and again among those that are left while they still show a regression."""
    found: list[Culprit] = []
    left, alone = list(suspects), judge.baseline.verdict
    while len(found) < MOST_CULPRITS:
        smallest = minimize(
            between, left, lambda moved: judge.half_of_it(moved).answer == "bad", guess & frozenset(left)
        )
        shown = alone if smallest == frozenset(left) else judge.half_of_it(smallest)
        rest = frozenset(left) - smallest
        legal = between.largest(rest)
        without = judge.any_of_it(legal) if legal else None
        out = tuple(sorted(path for group in rest - legal for path in group))
        found.append(Culprit(_values(between, smallest), shown, without, out))
        say(f"found: {', '.join(found[-1].fields)}")
        if without is None or without.answer != "bad":
            break
        left, alone = [group for group in left if group in legal], without
        judge.target = without.ratio or 1.0
    return found


def _values(between: PlansBetween, moved: Groups) -> dict[str, tuple[Any, Any]]:
    paths = {path for group in moved for path in group}
    return {
        each.path: (value_or_default(each.path, each.a), value_or_default(each.path, each.b))
        for each in between.differences
        if each.path in paths
    }


def _likely_first(between: PlansBetween, baseline: Baseline) -> tuple[list[Group], Groups]:
    """The differing fields, those first to which the cost model gives most of the regression's seconds or bytes; and
    the one that it gives at least half of them, where there is one."""

    def price(plan: Plan) -> dict[str, float]:
        if baseline.kind == "fails":
            return dict(memory(plan).worst.terms)
        return step_time(plan, rates_of(plan)).terms

    paths = [each.path for each in between.differences]
    try:
        shared = attribute(PlansBetween(between.a, between.b, layout_faults), price)
        amounts = {path: each.amount for each in shared.contributions for path in each.fields}
    except (FindingsError, ArithmeticError):  # it only saves trials
        amounts = {}
    ordered: list[Group] = [(path,) for path in sorted(paths, key=lambda path: (-amounts.get(path, 0.0), path))]
    largest, whole = max(amounts.values(), default=0.0), sum(amount for amount in amounts.values() if amount > 0)
    return ordered, frozenset(ordered[:1]) if largest > whole / 2 else frozenset()


def minimize(
    between: PlansBetween, suspects: Sequence[Group], is_bad: Callable[[Groups], bool], guess: Groups = frozenset()
) -> Groups:
    """A smallest bad set out of `suspects`, which are bad together. Likely ones come first; `guess` before all."""
    rank = {group: place for place, group in enumerate(suspects)}
    current, pieces = frozenset(suspects), 2
    if guess and guess < current:
        current = _first_bad([between.smallest(guess, current)], current, is_bad) or current
    while len(current) > 1:
        chunks = _chunks(sorted(current, key=rank.__getitem__), pieces)
        reduced = _first_bad(_smaller_sets(between, current, chunks), current, is_bad)
        if reduced is not None:
            current, pieces = reduced, 2
        elif pieces >= len(current):
            break
        else:
            pieces = min(2 * pieces, len(current))
    return current


def _smaller_sets(between: PlansBetween, current: Groups, chunks: list[Groups]) -> list[Groups]:
    """Each chunk with what it needs, then the rest without each chunk and without what needs it."""
    alone = [between.smallest(chunk, current) for chunk in chunks]
    without = [between.largest(current - chunk) for chunk in chunks]
    return [*alone, *without]


def _first_bad(sets: list[Groups], current: Groups, is_bad: Callable[[Groups], bool]) -> Groups | None:
    tried = {frozenset[Group](), current}
    for some in sets:
        if some not in tried:
            tried.add(some)
            if is_bad(some):
                return some
    return None


def _chunks(ordered: list[Group], pieces: int) -> list[Groups]:
    size, more = divmod(len(ordered), pieces)
    ends = [0]
    for piece in range(pieces):
        ends.append(ends[-1] + size + (piece < more))
    return [frozenset(ordered[start:end]) for start, end in pairwise(ends) if end > start]
