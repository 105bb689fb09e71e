"""The result of a hunt for a regression as text."""

from threefold.compare.regress.hunt import Culprit, Hunted
from threefold.compare.regress.verdicts import Verdict
from threefold.compare.statistics import Interval
from threefold.report.compare.comparison_text import value_text
from threefold.units import format_many


def hunted_text(found: Hunted) -> str:
    lines = [_baseline(found)]
    for number, culprit in enumerate(found.culprits, start=1):
        lines += ["", *_culprit(culprit, found, number if len(found.culprits) > 1 else 0)]
    if found.culprits:
        rounds = format_many(found.num_rounds, "round")
        lines += ["", f"{format_many(found.num_fields, 'differing field')}, {rounds} of trials"]
    return "\n".join(lines)


def _baseline(found: Hunted) -> str:
    verdict = found.baseline.verdict
    if found.baseline.kind == "fails":
        failed = ", ".join(f"{name} in {count} of {verdict.rounds}" for name, count in (verdict.failures or {}).items())
        return f"plan B fails: {failed} trials; plan A ran in all of them"
    per = "" if found.unit == "step" else f" per {found.unit}"
    said = f"plan B takes {_ratio(verdict)} the time of plan A{per}, in {format_many(verdict.rounds, 'round')}"
    if found.baseline.kind == "slower":
        return f"{said}: it is certainly slower"
    return f"{said}: no regression is certain" + ("" if verdict.is_certain else "; more --repeats may show a small one")


def _culprit(culprit: Culprit, found: Hunted, number: int) -> list[str]:
    head = f"culprit {number}:" if number else "culprit:"
    fields = [f"  {path} = {value_text(new)}  (A: {value_text(old)})" for path, (old, new) in culprit.fields.items()]
    together = ["  together: no part of them that can run alone shows half of it"] if len(fields) > 1 else []
    lines = [head, *fields, *together, f"  plan A with only this as in B: {_evidence(culprit.alone)}"]
    if culprit.without is not None:
        lines.append(f"  plan A with the other fields as in B: {_evidence(culprit.without)}")
    if culprit.left_out:
        lines.append(f"  of them not {', '.join(culprit.left_out)}: rules refuse the plan otherwise")
    return lines


def _evidence(verdict: Verdict) -> str:
    if verdict.ratio is not None:
        doubt = "" if verdict.is_certain else ", not certain: more --repeats would tell"
        return f"{_ratio(verdict)} the time of A in {format_many(verdict.rounds, 'round')}{doubt}"
    runs = format_many(verdict.rounds, "trial")
    if not verdict.failures:
        return f"ran in {runs}"
    return ", ".join(f"{name} in {count} of {runs}" for name, count in verdict.failures.items())


def _ratio(verdict: Verdict) -> str:
    assert verdict.ratio is not None
    return f"{verdict.ratio:.3f} x{_interval(verdict.interval)}"


def _interval(interval: Interval | None) -> str:
    return f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
