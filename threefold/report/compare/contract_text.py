"""Contracts, validations and the result of a hunt for a regression as text."""

from collections.abc import Sequence
from typing import Any

from threefold.compare.contract import Contract, Difference, undeclared, unstated
from threefold.compare.regress.hunt import Culprit, Hunted
from threefold.compare.regress.verdicts import Verdict
from threefold.compare.statistics import Interval
from threefold.compare.validation import Validation
from threefold.plan.table import FIELDS
from threefold.report.compare.comparison_text import differences_text, value_text
from threefold.report.terminal import table
from threefold.units import format_many

_WIDTH = 110
_MARKS = {"pass": "yes", "fail": "NO", "unknown": "?"}


def contract_text(contract: Contract) -> str:
    """The contract in a line a part: what differs from the defaults of a plan, and how many facts there are."""
    why = f" ({'; '.join(contract.why_benchmark)})" if contract.why_benchmark else ""
    lines = [f"contract {contract.hash} of {contract.source} ({contract.kind}), {contract.label}{why}"]
    for part, facts in contract.by_part().items():
        told = [f"{_short(path)} {value_text(value)}" for path, value in facts.items() if _is_telling(path, value)]
        lines.append(f"  {part:<12}{_cut(told, len(facts))}")
    return "\n".join(lines)


def check_text(contract: Contract, frozen: Contract, found: Sequence[Difference], declared: Sequence[str]) -> str:
    """How a contract keeps another one."""
    more = undeclared(found, declared)
    lines = [f"{contract.source} against contract {frozen.hash} of {frozen.source}"]
    if found:
        lines.append(differences_text(found, ("contract", "here")))
    if lacking := unstated(frozen, contract):
        shown = ", ".join(lacking[:4]) + (", ..." if len(lacking) > 4 else "")
        lines.append(f"{format_many(len(lacking), 'fact')} of the contract not stated here: {shown}")
    lines.append(verdict_of(found, more))
    return "\n".join(lines)


def verdict_of(found: Sequence[Difference], more: Sequence[Difference]) -> str:
    if not found:
        return "kept: no difference"
    if not more:
        return f"kept but for what was declared: {format_many(len(found), 'difference')}"
    kinds = {each.kind for each in more}
    verdict = "a new experiment" if "convergence" in kinds else "another way to run the same experiment"
    return f"not kept: {format_many(len(more), 'undeclared difference')}, {verdict}"


def validation_text(found: Validation) -> str:
    contract = found.contract
    rows = [[check.name, _MARKS[check.answer], check.evidence] for check in found.checks]
    why = f": {'; '.join(contract.why_benchmark)}" if contract.why_benchmark else ""
    head = f"{contract.source}, contract {contract.hash}, {contract.label}{why}"
    return "\n".join([head, table(["check", "", "evidence"], rows), f"verdict: {found.verdict}"])


def _short(path: str) -> str:
    return path.partition(".")[2] or path


def _is_telling(path: str, value: Any) -> bool:
    if value in (None, False, [], ""):
        return False
    return path not in FIELDS or value != FIELDS[path].default


def _cut(told: Sequence[str], count: int) -> str:
    """As many facts as a line takes, and how many there are in all."""
    line = ""
    for number, text in enumerate(told):
        if len(line) + len(text) > _WIDTH - 30:
            return f"{line}, and {count - number} more"
        line = f"{line}, {text}" if line else text
    rest = count - len(told)
    return f"{line or 'defaults'}" + (f" ({rest} at their defaults)" if line and rest else "")


def hunted_text(found: Hunted) -> str:
    lines = [_baseline(found)]
    for number, culprit in enumerate(found.culprits, start=1):
        lines += ["", *_culprit(culprit, found, number if len(found.culprits) > 1 else 0)]
    fields, rounds = format_many(found.num_fields, "differing field"), format_many(found.num_rounds, "round")
    return "\n".join([*lines, "", f"{fields}, {rounds} of trials; {found.label}"])


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
