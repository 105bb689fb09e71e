"""Whether a plan between A and B shows the regression: by repeated rounds that stop as soon as the answer is certain.

For a slower step each round times plan A and the other plan right after each other, in alternating order, and the mean
of the logarithms of their ratios is judged by Student's interval: at 99 % while rounds may still follow, because there
are several looks, and at 95 % in the last one. For a crash the other plan is run until it fails as B did, or often
enough to say that it does not.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from threefold.compare.regress.command import Outcome
from threefold.compare.regress.trials import Round, Trials
from threefold.compare.statistics import Interval, t_interval
from threefold.plan.plan import Plan

Answer = Literal["bad", "good", "unresolved"]

LEAST_ROUNDS = 3  # of times, before a difference can be certain
EARLY, LATE = 0.99, 0.95  # confidence of an early stop and of the last round


@dataclass(frozen=True, slots=True)
class Verdict:
    """What repeated trials of a plan say."""

    answer: Answer
    is_certain: bool
    rounds: int
    ratio: float | None = None  # the plan's time over that of A
    interval: Interval | None = None
    failures: dict[str, int] | None = None  # how often the plan failed, by kind

    def to_json(self) -> dict[str, Any]:
        return {
            "answer": self.answer,
            "certain": self.is_certain,
            "rounds": self.rounds,
            "ratio": self.ratio,
            "interval": list(self.interval) if self.interval else None,
            "failures": self.failures or {},
        }


def count_failures(outcomes: list[Outcome]) -> dict[str, int]:
    found: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.kind != "ok":
            found[outcome.signature] = found.get(outcome.signature, 0) + 1
    return found


def log_ratios(rounds: list[Round], role: str, scale: float) -> list[float]:
    """Logarithms of the other plan's time over that of A, for the same work."""
    pairs = [(each["A"].seconds, each[role].seconds) for each in rounds]
    return [math.log(other * scale / first) for first, other in pairs if first and other]


def ratio_of(logs: list[float], confidence: float = LATE) -> tuple[float, Interval | None]:
    """The mean ratio and its interval."""
    interval = t_interval(logs, confidence)
    mean = math.exp(math.fsum(logs) / len(logs))
    return mean, (math.exp(interval[0]), math.exp(interval[1])) if interval else None


def in_order(number: int, a: tuple[str, Plan], other: tuple[str, Plan]) -> list[tuple[str, Plan]]:
    """The two plans of a round; every other round begins with the other plan, so that a steady drift cancels."""
    return [a, other] if number % 2 == 0 else [other, a]


def judge_time(
    trials: Trials,
    name: str,
    a: Plan,
    other: Plan,
    threshold: float,
    most_rounds: int,
    amount: Callable[[Plan], float],
) -> Verdict:
    """Bad where the other plan takes more than `threshold` times the time of A.

    `amount` gives the units of work in a step of a plan.
    """
    rounds: list[Round] = []
    scale, border = amount(a) / amount(other), math.log(threshold)
    logs: list[float] = []
    for number in range(max(most_rounds, LEAST_ROUNDS)):
        rounds.append(trials.run_round(name, number, in_order(number, ("A", a), ("C", other))))
        failed = count_failures([each["C"] for each in rounds])
        logs = log_ratios(rounds, "C", scale)
        if failed or len(logs) < len(rounds):
            return Verdict("unresolved", True, len(rounds), failures=failed)
        if len(logs) >= LEAST_ROUNDS:
            interval = t_interval(logs, EARLY)
            if interval and not interval[0] <= border <= interval[1]:
                break
    ratio, interval = ratio_of(logs)
    is_certain = interval is not None and not interval[0] <= threshold <= interval[1]
    return Verdict("bad" if ratio > threshold else "good", is_certain, len(rounds), ratio, interval)


def judge_failure(trials: Trials, name: str, other: Plan, signature: str, most_rounds: int) -> Verdict:
    """Bad as soon as the other plan fails with this signature, good after so many runs without a failure."""
    outcomes: list[Outcome] = []
    for number in range(most_rounds):
        outcomes.append(trials.run_round(name, number, [("C", other)])["C"])
        failures = count_failures(outcomes)
        if signature in failures:
            return Verdict("bad", True, len(outcomes), failures=failures)
        if failures:
            return Verdict("unresolved", True, len(outcomes), failures=failures)
    return Verdict("good", True, len(outcomes), failures={})
