"""The loop of `threefold tune`: prove the baseline, find its wall, race changes one variable at a time, confirm.

`tune` is a function of the plan and of the ledger: everything that was decided follows from finished trials, so that an
interrupted tuning takes the same way again without measuring, and goes on where it was. Time and trials are counted
from the ledger, and only before something new is measured.
"""

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import median
from typing import Any

from threefold.compare.statistics import Interval, t_interval
from threefold.cost.estimate import estimate
from threefold.findings import Finding, FindingsError, as_overrides
from threefold.plan.plan import Plan
from threefold.rules.layout.batch import can_be_priced
from threefold.tune.labels import LossComparison, compare_loss_curves
from threefold.tune.ledger import BASELINE, Ledger, TrialRow
from threefold.tune.measurement import Measurement, Measurer, Trial, Window
from threefold.tune.propose import Candidate, propose
from threefold.tune.race import FINAL, MOST_ROUNDS, Answer, Verdict, judge_race, leader_of, log_gains, run_race

SCREEN = Window(warmup=3, steps=8, seconds=4.0)
CONFIRM = Window(warmup=5, steps=50)
RACE_SIZE = 4  # candidates that are measured side by side
ROUNDS_AHEAD = 3  # of a race, for which jobs are written at once where trials run elsewhere
LEAST_CONFIRMED, MOST_CONFIRMED = 4, 8  # rounds of a confirmation
# Confidence of an early stop and of the interval that is reported. They are high, because the winner is the best of
# many: a plan that is already best must come out as such in nearly every tuning.
EARLY, CONFIDENCE = 0.998, 0.99
PROOF, CONFIRMATION = "baseline", "confirmation"
WINNER = "winner"


@dataclass(frozen=True, slots=True)
class Settings:
    """How long and from what a tuning proposes."""

    budget_seconds: float = 480.0
    most_trials: int | None = None  # candidates that are screened
    extra: tuple[Mapping[str, Any], ...] = ()  # changes that the user asks for
    keep: frozenset[str] = frozenset()  # fields that no change may touch
    screen: Window = SCREEN
    confirm: Window = CONFIRM


@dataclass(frozen=True, slots=True)
class Adopted:
    """A change that was certainly better than the best plan before it."""

    candidate: Candidate
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The winner beside the baseline, measured anew."""

    speedup: float
    interval: Interval | None
    rounds: int
    baseline: Measurement  # of the long run
    winner: Measurement
    losses: LossComparison | None
    reason: str  # why the winner is not kept; empty where it is


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a tuning found."""

    baseline: Plan
    proof: Measurement
    wall: str
    wall_source: str  # "measured" or "estimated"
    wall_evidence: tuple[str, ...]
    adopted: tuple[Adopted, ...]
    confirmed: Confirmed | None
    trials: tuple[TrialRow, ...]
    verdicts: tuple[dict[str, Any], ...]
    contract: dict[str, Any]
    ended: str  # why no further change was tried

    @property
    def confirmed_seconds(self) -> float:
        """What the trials of the confirmation took."""
        return math.fsum(row.seconds for row in self.trials if row.stage.startswith(CONFIRMATION))

    @property
    def winner(self) -> Plan | None:
        kept = self.confirmed is not None and not self.confirmed.reason
        return self.adopted[-1].candidate.plan if kept and self.adopted else None


def tune(
    plan: Plan,
    contract: dict[str, Any],
    ledger: Ledger,
    measurer: Measurer,
    settings: Settings,
    say: Callable[[str], None],
) -> Tuned:
    """Tune the plan, or go on with the tuning in the ledger."""
    return _Tuning(plan, contract, ledger, measurer, settings, say).run()


class _Tuning:
    """What one process does of a tuning."""

    def __init__(
        self,
        plan: Plan,
        contract: dict[str, Any],
        ledger: Ledger,
        measurer: Measurer,
        settings: Settings,
        say: Callable[[str], None],
    ) -> None:
        self.plan, self.contract, self.ledger, self.measurer = plan, contract, ledger, measurer
        self.settings, self.say = settings, say
        self.session = measurer.session or uuid.uuid4().hex
        self.ended = "no further change is proposed"
        self.best = plan
        self.best_seconds = math.nan  # of a step of it, from its race
        self.adopted: list[Adopted] = []
        self.rejected: dict[str, tuple[Answer, str]] = {}  # the last answer of a change, and for which best plan
        self.together: dict[str, Any] = {}  # changes that were certainly better beside the one that was adopted last

    def run(self) -> Tuned:
        proof = self._prove_baseline()
        wall, source, evidence = self._wall(self.plan, proof)
        self.say(f"wall: {wall} ({source})")
        self._search(proof, wall)
        confirmed = self._confirm() if self.adopted else None
        trials, verdicts = self.ledger.trials(), self.ledger.verdicts()
        return Tuned(
            self.plan, proof, wall, source, evidence, tuple(self.adopted), confirmed, tuple(trials), tuple(verdicts),
            self.contract, self.ended,
        )  # fmt: skip

    def _prove_baseline(self) -> Measurement:
        screen = self.settings.screen
        self._trial(PROOF, 0, BASELINE, self.plan, replace(screen, is_fresh=True, is_traced=True))
        found = self._known(PROOF, 0, BASELINE)
        assert found is not None
        if found.error or not found.is_finite:
            problem = f"the baseline does not run: {found.error or 'its loss is not finite'}"
            advice = "run `threefold check` and `threefold train` on it first, and tune in another --out folder"
            raise FindingsError([Finding(rule="baseline-runs", at="baseline", problem=problem, advice=advice)])
        if found.is_image_free:
            problem = (
                "no step of the baseline has an image: the speed of a vision-language model without is no evidence"
            )
            advice = "give data with images, such as scenes, and tune in another --out folder"
            raise FindingsError(
                [Finding(rule="vlm-benchmark-has-images", at="job.data", problem=problem, advice=advice)]
            )
        return found

    def _wall(self, plan: Plan, found: Measurement) -> tuple[str, str, tuple[str, ...]]:
        """The wall that a traced trial of the plan shows. Whole layers that are recomputed are memory's doing."""
        if found.wall not in ("", "unknown") and not plan.full_recompute:
            return found.wall, "measured", found.wall_evidence
        key = f"estimated wall of {plan.hash}"
        kept = self.ledger.fact(key)
        if kept is None:
            kept = estimate(plan).wall if can_be_priced(plan) else "unknown"
            self.ledger.set_fact(key, kept)
        return kept, "estimated", ()

    def _next_wall(self) -> str:
        """The wall of the plan that was adopted, from a traced trial of it."""
        stage = f"profile of {self.best.hash}"
        if self.measurer.has_traces:
            self._trial(stage, 0, BASELINE, self.best, replace(self.settings.screen, is_traced=True))
        wall, source, _ = self._wall(self.best, self._known(stage, 0, BASELINE) or Measurement())
        self.say(f"wall: {wall} ({source})")
        return wall

    def _search(self, proof: Measurement, wall: str) -> None:
        """Race after race, until nothing is left to try."""
        number = 0
        while True:
            number += 1
            stage = f"race {number}"
            candidates = self._candidates(stage, wall)
            if not candidates:
                return
            verdicts = self._race(stage, candidates, proof)
            for one in candidates:
                if verdicts[one.name].rounds or verdicts[one.name].answer in FINAL:
                    self.ledger.set_verdict(stage, one.name, {**one.to_json(), **verdicts[one.name].to_json()})
            leader = leader_of(verdicts)
            for name, verdict in verdicts.items():
                if leader is None or verdict.answer in FINAL:
                    self.rejected[name] = (verdict.answer, self.best.hash)
            self._adopt(stage, leader, candidates, verdicts)
            if self._is_over and self.ledger.fact(f"race {number + 1}") is None:
                return
            if leader is not None:
                wall = self._next_wall()

    def _adopt(
        self, stage: str, leader: str | None, candidates: Sequence[Candidate], verdicts: Mapping[str, Verdict]
    ) -> None:
        """Make the leader of a race the best plan. What was certainly better beside it is proposed on top, at once."""
        self.together = {}
        if leader is None:
            return
        chosen = next(one for one in candidates if one.name == leader)
        for one in candidates:
            if verdicts[one.name].answer == "better" and not one.variable & {*chosen.variable, *self.together}:
                self.together |= dict(one.changes)
        self.adopted.append(Adopted(chosen, verdicts[leader]))
        self.best = chosen.plan
        self.best_seconds = median(
            row.measurement.seconds for row in self.ledger.trials(stage) if row.role == leader and row.measurement.steps
        )
        self.say(f"adopted: {leader} ({verdicts[leader].gain or 0.0:+.1%})")

    def _candidates(self, stage: str, wall: str) -> list[Candidate]:
        """The candidates of a race: each changes other variables. The first choice is kept in the ledger, because a
        later version of the estimate would choose others."""
        extra = [dict(changes) for changes in self.settings.extra]
        found, refused = propose(self.plan, self.best, wall, extra, self.together)
        asked = {as_overrides(changes) for changes in extra}
        found = [one for one in found if one.name in asked or not one.variable & self.settings.keep]
        kept = self.ledger.fact(stage)
        if kept is not None:
            by_name = {one.name: one for one in found}
            return [by_name[name] for name in kept if name in by_name]
        for way in refused:
            self.ledger.set_verdict("proposal", way.name, {**way.to_json(), "verdict": "refused"})
        most = self._most_candidates(stage)
        new = [one for one in found if one.name not in self.rejected]
        chosen = _of_different_variables(new or [one for one in found if self._deserves_another_try(one)], most)
        self.ledger.set_fact(stage, [one.name for one in chosen])
        return chosen

    def _deserves_another_try(self, one: Candidate) -> bool:
        """Whether a change gained nothing on an earlier plan than the best one, and may gain on this one."""
        answer, of_plan = self.rejected[one.name]
        return answer in ("no gain", "not certain") and of_plan != self.best.hash and (one.predicted_gain or 0.0) >= 0

    def _most_candidates(self, stage: str) -> int:
        most = self.settings.most_trials
        if most is None:
            return RACE_SIZE
        screened = {row.role for row in self.ledger.trials() if row.stage.startswith("race") and row.stage != stage}
        left = most - len(screened - {BASELINE})
        if left <= 0:
            self.ended = f"{most} changes were tried"
        return max(0, min(RACE_SIZE, left))

    def _race(self, stage: str, candidates: Sequence[Candidate], proof: Measurement) -> dict[str, Verdict]:
        plans = {BASELINE: self.best, **{one.name: one.plan for one in candidates}}

        def trial(number: int, role: str) -> bool:
            if self._known(stage, number, role) is not None:
                return True
            if self._is_over:
                return False
            self._prepare_race(stage, candidates, proof)
            if role != BASELINE and not self._has_reference(stage):
                self._trial(stage, -1, BASELINE, self.best, self.settings.screen)
            self._trial(stage, number, role, plans[role], self.settings.screen)
            return True

        self.say(f"{stage}: {', '.join(one.name for one in candidates)}")
        return run_race(candidates, lambda: self.ledger.trials(stage), trial, proof)

    def _prepare_race(self, stage: str, candidates: Sequence[Candidate], proof: Measurement) -> None:
        """Tell the measurer of the next rounds, as far as they are known."""
        verdicts = judge_race(self.ledger.trials(stage), candidates, proof)
        plans = [(one.name, one.plan) for one in candidates if verdicts[one.name].answer == "open"]
        done = next(number for number in count() if self._known(stage, number, BASELINE) is None)
        order = [] if self._has_reference(stage) else [(-1, BASELINE, self.best)]
        for number in range(done, min(done + ROUNDS_AHEAD, MOST_ROUNDS)):
            of_round = [(number, name, plan) for name, plan in plans if self._known(stage, number, name) is None]
            order += [*(of_round if number % 2 == 0 else of_round[::-1]), (number, BASELINE, self.best)]
        self._prepare(stage, [(*each, self.settings.screen) for each in order])

    def _prepare(self, stage: str, order: Sequence[tuple[int, str, Plan, Window]]) -> None:
        trials = [Trial(plan, replace(window, name=_trial_name(stage, n, role))) for n, role, plan, window in order]
        if trials:
            self.measurer.prepare(trials)

    def _confirm(self) -> Confirmed:
        """Baseline and winner in turns: a long run of each first, then short ones until the speedup is certain."""
        winner = self.best
        plans, rounds = {BASELINE: self.plan, WINNER: winner}, 0
        stage = f"{CONFIRMATION} of {winner.hash}"
        if not self.ledger.trials(stage):
            confirm, screen = self.settings.confirm, self.settings.screen
            pairs = [(n, role, plan) for n in range(LEAST_CONFIRMED) for role, plan in plans.items()]
            rounds_ahead = [(*pair, screen if pair[0] else confirm) for pair in pairs]
            self._prepare(stage, [*rounds_ahead, (MOST_CONFIRMED, BASELINE, self.plan, screen)])
        for number in range(MOST_CONFIRMED):
            window = self.settings.confirm if number == 0 else self.settings.screen
            for role in (BASELINE, WINNER):
                is_missing = self._known(stage, number, role) is None
                if is_missing and role == WINNER and not self._has_reference(stage):
                    self._trial(stage, -1, BASELINE, self.plan, self.settings.screen)
                fresh = replace(window, is_fresh=not self.ledger.trials(stage))
                self._trial(stage, number, role, plans[role], fresh)
            rounds = number + 1
            if any(row.measurement.error for row in self.ledger.trials(stage)):
                break
            early = t_interval(self._confirmed_logs(stage), EARLY) if rounds >= LEAST_CONFIRMED else None
            if early and not early[0] <= 0 <= early[1]:
                break
        self._trial(stage, MOST_CONFIRMED, BASELINE, self.plan, self.settings.screen)
        found = self._confirmation(stage, rounds)
        value = {"verdict": found.reason or "confirmed", "gain": found.speedup - 1, "rounds": rounds}
        value["interval"] = [bound - 1 for bound in found.interval] if found.interval else None
        self.ledger.set_verdict(stage, WINNER, value)
        return found

    def _confirmed_logs(self, stage: str) -> list[float]:
        return log_gains(self.ledger.trials(stage), WINNER)

    def _confirmation(self, stage: str, rounds: int) -> Confirmed:
        base, won = (self._known(stage, 0, role) or Measurement() for role in (BASELINE, WINNER))
        failed = [row for row in self.ledger.trials(stage) if row.measurement.error]
        if failed:
            reason = f"the {failed[0].role} failed in its confirmation: {failed[0].measurement.error}"
            return Confirmed(1.0, None, rounds, base, won, None, reason)
        logs = self._confirmed_logs(stage)
        interval = t_interval(logs, CONFIDENCE)
        has_losses = bool(base.losses or won.losses)  # a rank with rehearsed peers has none
        changed = self.adopted[-1].candidate.changed
        losses = compare_loss_curves(base.losses, won.losses, changed) if has_losses else None
        bounds = (math.exp(interval[0]), math.exp(interval[1])) if interval else None
        reason = _why_not_kept(bounds, base, won, losses)
        return Confirmed(math.exp(math.fsum(logs) / len(logs)), bounds, rounds, base, won, losses, reason)

    def _known(self, stage: str, number: int, role: str) -> Measurement | None:
        rows = [row for row in self.ledger.trials(stage) if row.round == number and row.role == role]
        return rows[0].measurement if rows else None

    def _has_reference(self, stage: str) -> bool:
        """Whether the best plan was measured in this session and stage, so that a trial can be compared with it."""
        rows = self.ledger.trials(stage)
        return any(row.role == BASELINE and row.session == self.session and row.measurement.steps for row in rows)

    def _trial(self, stage: str, number: int, role: str, plan: Plan, window: Window) -> None:
        """Measure, unless the ledger has it. Round -1 is for further trials of the best plan, after a resumption."""
        if number >= 0 and self._known(stage, number, role) is not None:
            return
        began = self.measurer.now()
        found = self.measurer.measure(plan, replace(window, name=_trial_name(stage, number, role)))
        when = (began, self.measurer.now() - began)
        fields = {path: list(value) if isinstance(value, tuple) else value for path, value in plan.written}
        self.ledger.add_trial((stage, number, role), self.session, (plan.hash, fields), when, found)
        said = found.error or f"{1e3 * found.seconds:.1f} ms a step"
        self.say(f"  {stage}, {role}: {said}")

    @property
    def _is_over(self) -> bool:
        """Whether the time for screening is used up. Confirming takes what two long runs and a few short ones take."""
        proof, *others = self.ledger.trials()
        steps = self.settings.confirm.warmup + self.settings.confirm.steps
        of_trial = median([row.seconds for row in others] or [proof.seconds])
        before = proof.measurement.seconds
        now = before if math.isnan(self.best_seconds) else self.best_seconds
        reserve = steps * (before + now) + 2 * LEAST_CONFIRMED * of_trial
        left = self.settings.budget_seconds - self.ledger.spent_seconds
        if left < min(reserve, self.settings.budget_seconds / 2):
            self.ended = f"the time of {self.settings.budget_seconds:.0f} s was used"
            return True
        return False


def _trial_name(stage: str, number: int, role: str) -> str:
    return f"{stage}-{number if number >= 0 else 'first'}-{role}"


def _of_different_variables(found: Sequence[Candidate], most: int) -> list[Candidate]:
    """The first candidates of which no two change the same field."""
    chosen: list[Candidate] = []
    for one in found:
        if len(chosen) < most and not any(one.variable & other.variable for other in chosen):
            chosen.append(one)
    return chosen


def _why_not_kept(bounds: Interval | None, base: Measurement, won: Measurement, losses: LossComparison | None) -> str:
    """Why a winner of races is not kept after its confirmation; empty where it is."""
    if bounds is None or bounds[0] <= 1:
        return "the interval of its speedup does not exclude no gain"
    if not won.is_finite or won.skipped > base.skipped:
        return "steps of it were not finite"
    if losses is not None and not losses.agrees:
        return "its losses differ from those of the baseline: benchmark-only"
    left_out = won.left_out(base)
    return f"{left_out}: benchmark-only" if left_out else ""
