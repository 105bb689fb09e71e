"""A contract and a validation as text."""

from collections.abc import Sequence
from typing import Any

from threefold.compare.contract import Contract, Difference, undeclared, unstated
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
