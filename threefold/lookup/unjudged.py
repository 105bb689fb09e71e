"""What a check did not judge: silence about a setting or a machine is no approval. `threefold check` ends with it."""

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from threefold.interop.megatron.export_plan import BRIDGE, export_plan
from threefold.lookup.names import plan_field, rules_about
from threefold.lookup.names import settings as all_settings
from threefold.plan.plan import Plan
from threefold.units import format_many

_THIS_MACHINE = ("GPUs and driver of this machine", "its versions of torch, NCCL and CUDA", "its packages of kernels")
_CLUSTER = ("links and NICs between the nodes", "drivers and packages of the other nodes")
_CLASSES = {
    *("TransformerConfig", "MLATransformerConfig", "ModelParallelConfig", "OptimizerConfig"),
    *("DistributedDataParallelConfig", "CommOverlapConfig", "CheckpointConfig", "GPTDatasetConfig"),
}
_HEADS = {
    "fields": "fields of the plan that no rule names",
    "settings": "settings of Megatron that no plan sets and no rule names: a recipe's own values stay",
    "facts": "facts that no plan has",
}


@dataclass(frozen=True, slots=True)
class Unjudged:
    fields: tuple[str, ...]
    settings: tuple[str, ...]
    facts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {name: list(values) for name, values in asdict(self).items()}

    @property
    def line(self) -> str:
        parts = [
            f"{format_many(len(self.fields), 'field')} of the plan that no rule names" if self.fields else "",
            f"{len(self.settings):,} settings of Megatron that no plan sets" if self.settings else "",
            f"{', '.join(self.facts[:2])} and {len(self.facts) - 2} more facts of machines and data",
        ]
        return f"not judged: {'; '.join(filter(None, parts))} (--unjudged lists them)"

    @property
    def text(self) -> str:
        lines = ["not judged"]
        for name, values in asdict(self).items():
            lines += [f"  {_HEADS[name]}", *(f"    {value}" for value in values)] if values else []
        return "\n".join(lines)


def unjudged(plan: Plan, runs: bool = True, here: bool = False, rehearsed: bool = False) -> Unjudged:
    """`runs` says that no error stops an export, `here` and `rehearsed` that the check looked at this machine, and at a
    rehearsal of the plan."""
    written = dict(plan.written)
    fields = [path for path in written if path not in ("model", "target") and not rules_about(path, path)]
    versions = [f"the version of {name}" for name in ("torch", "te") if f"stack.{name}" not in written]
    facts = [*(() if here else _THIS_MACHINE), *_CLUSTER, *versions, "what the data holds"]
    if not rehearsed:
        facts.append("the memory of a step that runs: its peak is predicted")
    settings = _other_settings(plan) if runs and plan.target == BRIDGE else ()
    return Unjudged(tuple(fields), settings, tuple(facts))


def _other_settings(plan: Plan) -> tuple[str, ...]:
    exported = {path.rpartition(".")[2] for path in export_plan(plan, BRIDGE).settings}
    return tuple(name for name in _without_field() if name not in exported)


@cache
def _without_field() -> tuple[str, ...]:
    """Settings of Megatron's classes that no field of a plan sets and no rule names."""
    own = (name for name, homes in all_settings().items() if any(home.holder in _CLASSES for home in homes))
    return tuple(sorted(name for name in own if not rules_about(name, None) and plan_field(name) is None))
