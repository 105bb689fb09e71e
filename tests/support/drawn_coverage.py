"""Counts which fields of a plan random layouts turned, and which of them together. `layout_ledger.py` prints it."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from drawn_fields import NOT_DRAWN
from drawn_layouts import Drawn, Resolved

from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS

Pair = tuple[str, str]


def fields_to_draw() -> list[str]:
    """Every field of a plan that a draw may turn, from the declarations of the plan."""
    return [path for path in FIELDS if path not in NOT_DRAWN and path.partition(".")[0] not in NOT_DRAWN]


def turned_fields(plan: Plan) -> list[str]:
    """The fields that a plan does not leave at their defaults."""
    fields = set(fields_to_draw())
    return [path for path, value in plan.written if path in fields and value != FIELDS[path].default]


def asked_fields(drawn: Drawn) -> list[str]:
    """The fields that a draw turned before the rules were asked."""
    fields = set(fields_to_draw())
    given = ((path, tuple(value) if isinstance(value, list) else value) for path, value in drawn.fields.items())
    return [path for path, value in given if path in fields and value != FIELDS[path].default]


@dataclass
class Coverage:
    """Fields and pairs of fields that accepted plans turned, and the rules that kept pairs apart."""

    num_plans: int = 0
    fields: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)
    apart: dict[Pair, Counter[str]] = field(default_factory=dict)  # rules that changed or refused draws with this pair

    def add_draw(self, drawn: Drawn, resolved: Resolved) -> None:
        turned = () if resolved.plan is None else turned_fields(resolved.plan)
        self.add(asked_fields(drawn), turned, (*resolved.repaired, *resolved.refusals))

    def add(self, asked: Collection[str], turned: Collection[str], rules: Sequence[str]) -> None:
        """Count one draw: what it asked for, what its plan turned (nothing where it was refused), which rules spoke."""
        self.num_plans += bool(turned)
        self.fields.update(turned)
        here = set(_pairs(turned))
        self.pairs.update(here)
        for pair in set(_pairs(asked)) - here:
            self.apart.setdefault(pair, Counter()).update(set(rules))

    def missing(self, paths: Sequence[str]) -> list[Pair]:
        """Pairs of these fields that no plan turned together."""
        return [pair for pair in _pairs(paths) if not self.pairs[pair]]

    def lines(self) -> Iterator[str]:
        """A summary: how often each field was turned, and which pairs never were, with the rule that parted most."""
        paths = fields_to_draw()
        all_pairs, missing = list(_pairs(paths)), self.missing(paths)
        yield f"{self.num_plans} plans turned {sum(bool(self.fields[path]) for path in paths)} of {len(paths)} fields"
        yield ", ".join(f"{path} {self.fields[path]}" for path in sorted(paths, key=lambda path: self.fields[path]))
        yield f"{len(all_pairs) - len(missing)} of {len(all_pairs)} pairs of fields were turned together; never:"
        for pair in missing:
            rules = self.apart.get(pair, Counter()).most_common(1)
            yield f"  {pair[0]} x {pair[1]}: " + (rules[0][0] if rules else "never drawn")


def _pairs(paths: Collection[str]) -> Iterator[Pair]:
    return combinations(sorted(paths), 2)
