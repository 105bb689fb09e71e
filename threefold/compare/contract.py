"""The contracts of two sides field by field: versions, hardware, model, data and routing, shapes, precision, timing.

A plan gives its fields, a run also what its contract.json says: versions, device, threads and fingerprint of the data,
and whatever else the engine writes there, such as flags that took effect. A trace has no contract of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from threefold.compare.field_groups import differing_fields
from threefold.compare.sides import Side
from threefold.findings import shown
from threefold.plan.plan import Plan
from threefold.plan.same_run import model_facts
from threefold.plan.table import FIELDS

_DEEPEST = 4  # tables in each other; a contract may come from a stranger
_MOST_FACTS = 1000
# Keys of contract.json that other parts of the comparison speak of, or that say nothing about the work.
_ELSEWHERE = ("plan", "fields", "model", "sources", "started", "timing")

# The part of the contract that a field belongs to, by the start of its path; the first match counts.
_PARTS = (
    ("model", ("model",)),
    ("hardware", ("cluster.", "device", "threads")),
    ("software", ("target", "stack.", "threefold", "torch", "python")),
    ("shapes", ("job.seq_len", "job.global_batch", "job.micro_batch", "job.dynamic_length", "job.packing")),
    ("routing", ("job.routing", "job.capacity", "job.aux_loss", "job.seq_aux", "job.z_loss", "job.bias_rate")),
    ("data", ("job.data", "job.tokenizer", "job.val_", "job.max_bad", "tokenizer")),
    ("data", ("job.images", "job.task", "job.seed", "data", "benchmark_only")),
    ("timing", ("job.steps", "steady")),
    ("job", ("job.",)),
    ("precision", ("knobs.precision", "knobs.fp8", "knobs.optimizer_dtype", "knobs.grad_dtype", "knobs.master")),
    ("precision", ("knobs.store_param", "knobs.muon_dtype")),
    ("layout", ("layout.",)),
    ("knobs", ("knobs.",)),
    ("run", ("run.",)),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact of the contract that is not the same on both sides."""

    part: str
    field: str
    a: Any
    b: Any

    def to_json(self) -> dict[str, Any]:
        return {"part": self.part, "field": self.field, "a": _plain(self.a), "b": _plain(self.b)}


def contract_differences(a: Side, b: Side) -> list[Difference]:
    """Every fact that differs, in the order of the parts. What only one side can know is left out."""
    found = []
    if a.plan is not None and b.plan is not None:
        found += [
            _difference(each.path, value_or_default(each.path, each.a), value_or_default(each.path, each.b))
            for each in differing_fields(a.plan, b.plan)
        ]
        if not any(each.field == "model" for each in found):  # the same path, another file behind it
            found += [
                _difference(f"model.{path}", old, new) for path, old, new in model_fact_differences(a.plan, b.plan)
            ]
    known = [dict(_contract_facts(side)) for side in (a, b)]
    for path in known[0].keys() & known[1].keys():
        if known[0][path] != known[1][path]:
            found.append(_difference(path, known[0][path], known[1][path]))
    places = [part for part, _ in _PARTS]
    unique = {each.field: each for each in found}
    return sorted(unique.values(), key=lambda each: ([*places, each.part].index(each.part), each.field))


def model_fact_differences(a: Plan, b: Plan) -> list[tuple[str, Any, Any]]:
    """Facts of the models that differ, each with both values; None where a model has not such a part."""
    old, new = (dict(flat(model_facts(plan))) for plan in (a, b))
    return [
        (path, old.get(path), new.get(path))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    ]


def flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by dotted path."""
    for name, value in facts.items():
        if isinstance(value, Mapping) and prefix.count(".") < _DEEPEST:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _contract_facts(side: Side) -> Iterator[tuple[str, Any]]:
    if side.run is None:
        return
    contract = {name: value for name, value in side.run.contract.items() if name not in _ELSEWHERE}
    for count, (path, value) in enumerate(flat(contract)):
        if count == _MOST_FACTS:
            return
        yield path, value


def _difference(path: str, a: Any, b: Any) -> Difference:
    part = next((part for part, starts in _PARTS if path.startswith(starts)), "other")
    return Difference(part, path, a, b)


def value_or_default(path: str, value: Any) -> Any:
    """A field's value, its default where it is not written."""
    default = FIELDS[path].default if path in FIELDS else None
    return default if value is None else value


def _plain(value: Any) -> Any:
    """A value for JSON: text for what is long or unusual."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value] if len(value) <= 32 else shown(value)
    return value if value is None or isinstance(value, str | int | float | bool) else shown(value)
