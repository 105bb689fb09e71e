"""Races candidates against the best plan so far, in interleaved rounds that stop as soon as the answer is certain.

A round measures every candidate once, and the best plan before and after them; every other round goes backwards. The
time of the best plan at the moment of a candidate's trial is interpolated between the two trials of it around that
moment, in the same session, so that a machine that slows down or recovers does not decide. Gains are means of the
logarithms of ratios with Student's intervals. The spread is pooled over the candidates of a race; the confidence is
raised for the number of candidates and of looks (Bonferroni), so that a race of equals errs in one of fifty cases. The
confirmation that follows is measured anew.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from threefold.compare.statistics import Interval, t_quantile
from threefold.tune.labels import compare_loss_curves
from threefold.tune.ledger import BASELINE, TrialRow
from threefold.tune.measurement import Measurement
from threefold.tune.propose import Candidate

MOST_ROUNDS = 6
LEAST_FREEDOM = 3  # degrees of freedom of the pooled spread, before a difference can be certain
ERROR = 0.02  # of a whole race
WORTH = 0.003  # gain below which a candidate is dropped
LEAST_SPREAD = 0.001  # of the logarithm of a ratio: clocks and steps are not exact, whatever a few rounds say

Answer = Literal["better", "no gain", "not certain", "failed", "losses differ", "work left out", "no effect", "open"]
FINAL: tuple[Answer, ...] = ("no gain", "failed", "losses differ", "work left out", "no effect")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rounds of a candidate say."""

    answer: Answer
    rounds: int
    gain: float | None = None  # of throughput, as a fraction
    interval: Interval | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.answer,
            "rounds": self.rounds,
            "gain": self.gain,
            "interval": list(self.interval) if self.interval else None,
            "reason": self.reason,
        }


def log_gains(rows: Sequence[TrialRow], role: str) -> list[float]:
    """Logarithms of the best plan's time over that of the candidate, one a trial of the candidate."""
    found = []
    for index, row in enumerate(rows):
        if row.role != role or not row.measurement.steps:
            continue
        reference = _reference(rows, index)
        if reference is not None:
            found.append(reference - math.log(row.measurement.seconds))
    return found


def _reference(rows: Sequence[TrialRow], index: int) -> float | None:
    """The logarithm of the best plan's time at the moment of a trial; None where its session has none."""
    row = rows[index]

    def is_one(other: TrialRow) -> bool:
        return other.role == BASELINE and other.session == row.session and bool(other.measurement.steps)

    before = next((other for other in reversed(rows[:index]) if is_one(other)), None)
    after = next((other for other in rows[index + 1 :] if is_one(other)), None)
    ends = [other for other in (before, after) if other is not None]
    if len(ends) < 2:
        return math.log(ends[0].measurement.seconds) if ends else None
    logs = [math.log(end.measurement.seconds) for end in ends]
    span = ends[1].middle - ends[0].middle
    share = (row.middle - ends[0].middle) / span if span > 0 else 0.5
    return logs[0] + share * (logs[1] - logs[0])


def judge_race(rows: Sequence[TrialRow], candidates: Sequence[Candidate], baseline: Measurement) -> dict[str, Verdict]:
    """The verdict of each candidate after the rounds so far. `baseline`: the plan that the tuning began with."""
    logs = {one.name: log_gains(rows, one.name) for one in candidates}
    squares = [(value - math.fsum(some) / len(some)) ** 2 for some in logs.values() for value in some]
    freedom = sum(max(0, len(some) - 1) for some in logs.values())
    spread = max(LEAST_SPREAD, math.sqrt(math.fsum(squares) / freedom)) if freedom else math.inf
    confidence = 1 - ERROR / (len(candidates) * MOST_ROUNDS)
    width = t_quantile((1 + confidence) / 2, freedom) * spread if freedom >= LEAST_FREEDOM else math.inf
    found = {}
    for one in candidates:
        fault = _fault([row.measurement for row in rows if row.role == one.name], one, baseline)
        found[one.name] = fault or _by_time(logs[one.name], width)
    return found


def _fault(trials: Sequence[Measurement], candidate: Candidate, baseline: Measurement) -> Verdict | None:
    """Why the candidate cannot win, whatever its time."""
    rounds = len(trials)
    for found in trials:
        if found.error:
            return Verdict("failed", rounds, reason=f"{found.failure}: {found.error}")
        if not found.is_finite or found.skipped > baseline.skipped:
            return Verdict("losses differ", rounds, reason=f"{found.skipped} steps were not finite")
        if left_out := found.left_out(baseline):
            return Verdict("work left out", rounds, reason=left_out)
        if lacking := found.lacks_effect({path for path, value in candidate.changes.items() if value is not None}):
            return Verdict("no effect", rounds, reason="; ".join(lacking))
        losses = compare_loss_curves(baseline.losses, found.losses, candidate.changed)
        if baseline.losses and not losses.agrees:
            said = f"mean loss {losses.other:.4f} over {losses.num_steps} steps, {losses.baseline:.4f} in the baseline"
            return Verdict("losses differ", rounds, reason=said)
    return None


def _by_time(logs: Sequence[float], width: float) -> Verdict:
    if not logs:
        return Verdict("open", 0)
    mean = math.fsum(logs) / len(logs)
    half = width / math.sqrt(len(logs))
    if math.isinf(half):
        return Verdict("open", len(logs), math.expm1(mean))
    low, high = mean - half, mean + half
    answer: Answer = "better" if low > 0 else "no gain" if math.expm1(high) < WORTH else "open"
    return Verdict(answer, len(logs), math.expm1(mean), (math.expm1(low), math.expm1(high)))


Trial = Callable[[int, str], bool]  # measures a round's trial of a role unless it is known; False: no time is left


def run_race(
    candidates: Sequence[Candidate],
    rows: Callable[[], Sequence[TrialRow]],
    trial: Trial,
    baseline: Measurement,
) -> dict[str, Verdict]:
    """Run rounds until a candidate is certainly better, none can be, or the rounds or the time are over."""
    verdicts = {one.name: Verdict("open", 0) for one in candidates}
    for number in range(MOST_ROUNDS):
        open_ones = [one for one in candidates if verdicts[one.name].answer == "open"]
        order = open_ones if number % 2 == 0 else open_ones[::-1]
        if not all(trial(number, one.name) for one in order) or not trial(number, BASELINE):
            break
        verdicts = judge_race(rows(), candidates, baseline)
        answers = {verdict.answer for verdict in verdicts.values()}
        if "better" in answers or "open" not in answers:
            break
    found = judge_race(rows(), candidates, baseline)
    if leader_of(found) is not None:
        return found  # what is still open is raced again, on top of the leader
    return {name: replace(v, answer="not certain") if v.answer == "open" else v for name, v in found.items()}


def leader_of(verdicts: dict[str, Verdict]) -> str | None:
    """The candidate with the largest gain of those that are certainly better."""
    better = [name for name, verdict in verdicts.items() if verdict.answer == "better"]
    return max(better, key=lambda name: verdicts[name].gain or 0.0, default=None)
