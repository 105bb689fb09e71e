"""The contract of a plan, a run or a foreign job: what must not move while its speed is measured or compared.

A `Contract` is a flat table of facts, such as `knobs.precision` or `software.torch`. `read_contract.py` makes one from
a plan, a run's folder, logs or a contract's file; `differences` compares two. A fact that one side cannot know is not a
difference, it is `unstated`. Every fact belongs to a part and is of one of two kinds: a change of a convergence field
is a new experiment, a change of an execution field may only move speed and memory.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from threefold.findings import Finding, shown
from threefold.plan.plan import Plan
from threefold.plan.same_run import listed, model_facts
from threefold.plan.table import FIELDS

Kind = Literal["convergence", "execution"]
Facts = dict[str, Any]

VERSION = 1  # of the format of a contract's file
_DEEPEST = 4  # tables in each other; a contract may come from an untrusted folder
MOST_FACTS = 2000
TRAINING, NEW_EXPERIMENT, BENCHMARK = "training-equivalent", "new experiment", "benchmark-only"

# Formats in which numbers are rounded: arithmetic, gradients, optimizer states. Other knobs change the order of sums.
PRECISION_FIELDS = (
    "knobs.precision",
    "knobs.optimizer_dtype",
    "knobs.grad_dtype",
    "knobs.master_weights",
    "knobs.muon_dtype",
    "knobs.router_dtype",
    "knobs.fp8_params",
    "knobs.fp8_attention",
    "knobs.fp8_output",
    "knobs.fp8_dispatch",
)
# The part and the kind of a fact, by the start of its path; the first match counts.
_PARTS: tuple[tuple[str, Kind, tuple[str, ...]], ...] = (
    ("model", "convergence", ("model",)),
    ("hardware", "execution", ("cluster.", "hardware.")),
    ("software", "execution", ("target", "stack.", "software.")),
    ("environment", "execution", ("environment.",)),
    ("shapes", "execution", ("job.micro_batch",)),
    ("shapes", "convergence", ("job.seq_len", "job.global_batch", "job.dynamic_length", "job.packing")),
    ("routing", "convergence", ("job.routing", "job.capacity")),
    ("losses", "convergence", ("job.aux_loss", "job.seq_aux", "job.z_loss", "job.bias_rate", "job.mtp")),
    ("timing", "execution", ("job.steps", "timing.")),
    ("run", "execution", ("run.", "job.val_data", "job.load")),
    ("data", "convergence", ("job.data", "job.tokenizer", "job.val_fraction", "job.max_bad", "job.images", "job.seed")),
    ("data", "convergence", ("job.max_pixels", "data", "tokenizer")),
    ("task", "convergence", ("job.task", "job.freeze", "job.lora", "lineage", "benchmark_only")),
    ("optimizer", "convergence", ("job.", "optimizer.")),
    ("precision", "convergence", PRECISION_FIELDS),
    ("layout", "execution", ("layout.",)),
    ("graphs", "execution", ("knobs.graph", "knobs.compile")),
    ("knobs", "execution", ("knobs.", "effective.")),
)
_CONTENT = {"job.data": "data.", "job.tokenizer": "tokenizer."}
PARTS = tuple(dict.fromkeys(part for part, _, _ in _PARTS))
OTHER = "other"  # settings of another system that no field of a plan holds: `settings.NAME`


@dataclass(frozen=True)
class Contract:
    """What must not move, as far as its source says."""

    source: str  # as it was given
    kind: Literal["plan", "run", "log", "contract", "trace"]
    facts: Facts
    why_benchmark: tuple[str, ...] = ()  # why nothing that is measured under it can be accepted for training
    has_all_settings: bool = False  # a setting of another system that it does not state is off, or as it always is

    @property
    def label(self) -> str:
        return BENCHMARK if self.why_benchmark else TRAINING

    @property
    def hash(self) -> str:
        """Sixteen hex digits of what must not move. Where the source lies is no part of it."""
        text = json.dumps([self.facts, list(self.why_benchmark)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {
            "contract": VERSION,
            "hash": self.hash,
            "source": self.source,
            "kind": self.kind,
            "label": self.label,
            "why_benchmark": list(self.why_benchmark),
            "has_all_settings": self.has_all_settings,
            "facts": self.facts,
        }

    def by_part(self) -> dict[str, Facts]:
        """The facts in the order of the parts; parts without any are left out."""
        found: dict[str, Facts] = {part: {} for part in (*PARTS, OTHER)}
        for path, value in self.facts.items():
            found[part_of(path)][path] = value
        return {part: facts for part, facts in found.items() if facts}


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact of the contract that is not the same on both sides."""

    field: str
    a: Any
    b: Any

    @property
    def part(self) -> str:
        return part_of(self.field)

    @property
    def kind(self) -> Kind:
        return kind_of(self.field)

    def to_json(self) -> dict[str, Any]:
        return {"part": self.part, "class": self.kind, "field": self.field, "a": plain(self.a), "b": plain(self.b)}


def part_of(path: str) -> str:
    return next((part for part, _, starts in _PARTS if path.startswith(starts)), OTHER)


def kind_of(path: str) -> Kind:
    """The kind of a fact. What no field of a plan holds may change what is learned, until somebody says otherwise."""
    return next((kind for _, kind, starts in _PARTS if path.startswith(starts)), "convergence")


def differences(a: Contract, b: Contract) -> list[Difference]:
    """Every fact that both sides state and that differs, in the order of the parts."""
    both = {path for path in a.facts.keys() & b.facts.keys() if not _is_known_by_content(path, a, b)}
    found = [Difference(path, a.facts[path], b.facts[path]) for path in both if a.facts[path] != b.facts[path]]
    if a.has_all_settings and b.has_all_settings:
        rest = (path for path in a.facts.keys() ^ b.facts.keys() if part_of(path) == OTHER)
        found += [Difference(path, a.facts.get(path), b.facts.get(path)) for path in rest]
    order = (*PARTS, OTHER)
    return sorted(found, key=lambda each: (order.index(each.part), each.field))


def _is_known_by_content(path: str, a: Contract, b: Contract) -> bool:
    """Whether the path of data or a tokenizer says nothing, because both sides say what lay there."""
    prefix = _CONTENT.get(path)
    return prefix is not None and all(any(fact.startswith(prefix) for fact in each.facts) for each in (a, b))


def unstated(a: Contract, b: Contract) -> list[str]:
    """Facts of A that B does not state."""
    return sorted(a.facts.keys() - b.facts.keys())


def undeclared(found: Sequence[Difference], declared: Iterable[str]) -> list[Difference]:
    """Differences other than those that were declared; a declared table such as `layout` stands for its fields."""
    allowed = tuple(declared)
    return [
        each for each in found if not any(each.field == path or each.field.startswith(f"{path}.") for path in allowed)
    ]


def refusal(found: Sequence[Difference], declared: Sequence[str]) -> Finding | None:
    """Why two sides are no A/B of the declared fields; None where they are."""
    more = undeclared(found, declared)
    if not more:
        return None
    said = listed([f"{each.field} ({each.kind}) {shown(plain(each.a))}, {shown(plain(each.b))}" for each in more])
    problem = f"more differs than {', '.join(declared) or 'nothing, which was declared'}: {said}"
    advice = "make the two alike there, or declare each field that may differ: --declare FIELD"
    return Finding(rule="one-declared-difference", at=more[0].field, problem=problem, advice=advice)


def plan_facts(plan: Plan, is_complete: bool = True) -> Facts:
    """The facts of a plan. Of an incomplete one only the fields that were stated count: the rest is the recipe's."""
    values = dict(plan.written)
    known = FIELDS if is_complete else values.keys() | plan.stated
    paths = [path for path in known if path in FIELDS and not path.startswith("model")]
    facts: Facts = {path: plain(value_or_default(path, values.get(path))) for path in paths}
    facts["optimizer.decay_steps"] = None if plan.job.lr_schedule == "constant" else plan.job.steps
    if not is_complete and "job.steps" not in facts:
        del facts["optimizer.decay_steps"]
    return facts | {f"model.{path}": plain(value) for path, value in flat(model_facts(plan))}


def why_benchmark(plan: Plan) -> tuple[str, ...]:
    """Why nothing that the plan measures can be accepted for training; empty where it can."""
    said = []
    if plan.is_synthetic:
        said.append("job.data is made up")
    if plan.model.is_moe and plan.job.routing == "forced-balance":
        said.append("job.routing chooses experts by force")
    if plan.is_image_free:
        said.append("a vision-language model sees no image")
    return tuple(said)


def label_of(*plans: Plan) -> str:
    """Whether what the plans measure could be accepted for training."""
    return BENCHMARK if any(map(why_benchmark, plans)) else TRAINING


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


def value_or_default(path: str, value: Any) -> Any:
    """A field's value, its default where it is not written."""
    default = FIELDS[path].default if path in FIELDS else None
    return default if value is None else value


def plain(value: Any) -> Any:
    """A value for JSON: text for what is long or unusual."""
    if isinstance(value, tuple | list):
        return [plain(each) for each in value] if len(value) <= 32 else shown(value)
    return value if value is None or isinstance(value, str | int | float | bool) else shown(value)
