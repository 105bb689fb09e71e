"""The rule registry. A rule is a function from a plan to findings; its name is its slug.

Its docstring says what it holds (first paragraph), then `Why:`, `Confirm:` and `Fix:`, which
`threefold check --explain` prints. `rows` are the ids of docs/coverage.md that it covers. A rule that follows an
assertion of Megatron names it in `refused_in` (`megatron_refuses`): it then knows the line in each release, and speaks
only for those that have it.
"""

import inspect
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import threefold
from threefold.findings import Explanation, Finding, Severity, in_order
from threefold.plan.plan import Plan
from threefold.spec.megatron import places, release_of

Check = Callable[[Plan], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    slug: str
    check: Check
    severity: Severity
    target: str  # a stack, or "both"
    rows: tuple[str, ...]
    follows: str  # where upstream code or a published figure says so
    explanation: Explanation
    home: str
    needs_fix: bool = False  # an offer more than a fault: nothing is said where no fix holds
    refused_in: tuple[str, str] | None = None  # a file under `megatron/`, and words of its message there

    def holds_for(self, plan: Plan) -> bool:
        """Whether the plan's stack is one that the rule speaks of, in a release that has what it follows."""
        if self.target not in ("both", plan.target):
            return False
        if self.refused_in is None or plan.target != "megatron-bridge":
            return True
        return places()[self.slug].holds_for(release_of(plan.stack.release))


RULES: dict[str, Rule] = {}
# Folders whose `explanations.toml` says what their findings mean, and the step at which these are raised.
RAISED_BY = {
    "plan": "reading a plan",
    "engine": "running",
    "profile": "profiling",
    "compare": "comparing",
    "tune": "tuning",
    "interop": "importing",
    "explore": "exploring",
}
PREDICTED = frozenset({"peak-fits-memory", "peak-near-memory"})  # rules that judge an estimate


def rule(
    rows: str = "",
    severity: Severity = "error",
    target: str = "both",
    follows: str = "",
    needs_fix: bool = False,
    refused_in: tuple[str, str] | None = None,
) -> Callable[[Check], Check]:
    """Register a function as a rule. `tools/read_megatron.py` looks for the places of `refused_in`."""

    def register(check: Check) -> Check:
        slug = check.__name__.replace("_", "-")
        if slug in RULES:
            raise ValueError(f"two rules named {slug}")
        explanation = _read_docstring(check)
        home = check.__module__
        place = places().get(slug) if refused_in else None
        RULES[slug] = Rule(
            slug,
            check,
            severity,
            target,
            tuple(rows.split()),
            str(place) if place else follows,
            explanation,
            home,
            needs_fix,
            refused_in,
        )
        return check

    return register


def megatron_refuses(file: str, words: str, rows: str = "", severity: Severity = "error") -> Callable[[Check], Check]:
    """Register a rule for the target `megatron-bridge` that follows a message in one of Megatron's files."""
    return rule(rows, severity, "megatron-bridge", refused_in=(file, words))


def judge(plan: Plan, notes: bool = False, leave_out: Collection[str] = ()) -> list[Finding]:
    """Every finding about a plan at once, errors first, with the rules' ways to a fix untried. Notes only if asked.
    Rules named in `leave_out` are not asked."""
    found: list[Finding] = []
    for one in RULES.values():
        if one.slug not in leave_out and one.holds_for(plan) and (notes or one.severity != "note"):
            found.extend(_signed(finding, one, plan) for finding in one.check(plan))
    return in_order(found)


def _signed(finding: Finding, one: Rule, plan: Plan) -> Finding:
    """The finding with its rule's name; a fix need not delete what was never written."""
    fix = {path: v for path, v in (finding.fix or {}).items() if v is not None or path in plan.stated}
    return replace(finding, rule=one.slug, severity=one.severity, fix=fix)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == "error"]


def blockers(findings: Iterable[Finding]) -> list[Finding]:
    """Errors that leave nothing to estimate. A predicted peak over the memory is not one: the estimate shows why."""
    return [finding for finding in errors(findings) if finding.rule not in PREDICTED]


@cache
def _explanations(folder: str) -> dict[str, Explanation]:
    """What the findings mean that the code of one folder raises; read only where somebody asks."""
    text = (Path(threefold.__file__).parent / folder / "explanations.toml").read_text(encoding="utf-8")
    return {slug: Explanation(**fields) for slug, fields in tomllib.loads(text).items()}


def explain(slug: str) -> Explanation | None:
    """What a slug means, whether a rule or another step raises it."""
    if slug in RULES:
        return RULES[slug].explanation
    return next((_explanations(folder)[slug] for folder in RAISED_BY if slug in _explanations(folder)), None)


def known_slugs() -> list[str]:
    return [*RULES, *(slug for folder in RAISED_BY for slug in _explanations(folder))]


def severity_of(slug: str) -> Severity:
    explanation = explain(slug)
    assert explanation is not None, slug
    return RULES[slug].severity if slug in RULES else explanation.severity


def raised_by(slug: str) -> str:
    """The step at which a slug is raised: `check` (a rule), reading a plan file, a run or `profile`."""
    if slug in RULES:
        return "check"
    return next((step for folder, step in RAISED_BY.items() if slug in _explanations(folder)), "running")


def _read_docstring(check: Check) -> Explanation:
    doc = inspect.getdoc(check) or ""
    parts = re.split(r"\n+(Why|Confirm|Fix):", doc)
    said: dict[str, Any] = dict(zip(parts[1::2], parts[2::2], strict=True))
    missing = [name for name in ("Why", "Confirm", "Fix") if not said.get(name, "").strip()]
    if missing or not parts[0].strip():
        raise ValueError(f"rule {check.__name__} lacks {missing or 'a first line'} in its docstring")
    what, why, confirm, fix = (
        " ".join(text.split()) for text in (parts[0], *(said[n] for n in ("Why", "Confirm", "Fix")))
    )
    return Explanation(what, why, confirm, fix)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def near_degrees(allowed: Iterable[int], wanted: int) -> list[int]:
    """Up to four allowed degrees around the wanted one, smaller ones first: less parallelism always runs."""
    degrees = sorted(set(allowed))
    below = [d for d in degrees if d <= wanted]
    above = [d for d in degrees if d > wanted]
    return [*below[:-3:-1], *above[:2]]


def version(text: str) -> tuple[int, ...]:
    """'2.11.0+cu130' and 'v2.11.0' -> (2, 11, 0), 'nemo-26.04' -> (26, 4), 'nightly' -> ()."""
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)", text) or re.search(r"(?<![\w.])(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def older(text: str | None, than: str) -> bool:
    """Whether a stated version is older; one that is unstated or has no number is never complained about."""
    return text is not None and () < version(text) < version(than)


def without(words: tuple[str, ...], *gone: str) -> list[str]:
    return [word for word in words if word not in gone]
