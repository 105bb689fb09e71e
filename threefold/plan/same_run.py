"""What makes two plans plans of one run: model and data by content, the job, and the knobs a checkpoint depends on.

A run folder keeps the facts of its model and data in contract.json. A path such as `hf:config.json` says nothing about
what the file held when the run was started, and files may be moved. Fields that the contract has by content are not
compared by their text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from threefold.findings import shown
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS

# The knobs that decide what a checkpoint holds.
_CHECKPOINT_KNOBS = ("knobs.precision", "knobs.optimizer_dtype", "knobs.master_weights")
# What is known about a model beside what it is; and what no step behind the first one reads.
_BESIDE = ("name", "source", "published_total", "published_active", "approximate", "init_std")
MODEL, DATA, TOKENIZER = "model", "sources", "tokenizer"  # the keys of a contract that hold content
# Neither how long a run is nor what it is evaluated on changes what it learns, nor how its load is predicted.
_FREE = ("job.steps", "job.val_data", "job.load")
_MOST_SHOWN = 6
_DEEPEST = 4  # tables in each other; a contract may come from a stranger


def model_facts(plan: Plan) -> dict[str, Any]:
    """What the plan's model is, as JSON reads it back."""
    facts = {name: value for name, value in asdict(plan.model).items() if name not in _BESIDE}
    found: dict[str, Any] = json.loads(json.dumps(facts))
    return found


def fixed_fields(plan: Plan) -> dict[str, Any]:
    """The fields that must stay the same when a run goes on.

    The number of steps, validation data, the layout, the cluster and how the run is watched may change.
    """
    return {path: value for path, value in plan.written if path in _CHECKPOINT_KNOBS or _defines_the_model(path)}


def _defines_the_model(path: str) -> bool:
    return path not in _FREE and path.startswith(("model", "job."))


def field_differences(before: Plan, now: Plan, contract: Mapping[str, Any] | None = None) -> list[str]:
    """Each fixed field that is not as it was, in words; not those whose content the contract of the run has."""
    has_model = isinstance((contract or {}).get(MODEL), Mapping)
    has_data = _is_content((contract or {}).get(DATA))
    has_tokenizer = isinstance((contract or {}).get(TOKENIZER), Mapping)
    old, new = (
        {
            path: value
            for path, value in fixed_fields(plan).items()
            if not (has_model and path.partition(".")[0] == "model")
            and not (has_data and path == "job.data")
            and not (has_tokenizer and path == "job.tokenizer")
        }
        for plan in (before, now)
    )
    return [_said(path, old, new) for path in sorted(old.keys() | new.keys()) if old.get(path) != new.get(path)]


def _said(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    was, now = (shown(fields[path]) if path in fields else _said_default(path) for fields in (old, new))
    return f"{path} was {was}, now {now}"


def _said_default(path: str) -> str:
    """The default of a field that a plan does not write, for a reader who does not know it."""
    default = FIELDS[path].default if path in FIELDS else None
    return "not stated" if default is None else f"{shown(default)} (the default)"


def model_differences(facts: Any, now: Plan) -> list[str]:
    """Each fact of the model that is not as the run's contract has it; none where the contract has no facts.

    Facts that only one side knows are left out: another version of this package knew more, or less, of a model.
    """
    return _fact_differences("model.", facts, model_facts(now)) if isinstance(facts, Mapping) else []


def data_differences(content: Any, now: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each fact of the data that is not as the run's contract has it; none where the contract has none."""
    if not _is_content(content):
        return []
    if len(content) != len(now):
        return [f"job.data had {len(content)} sources, now {len(now)}"]
    pairs = enumerate(zip(content, now, strict=True))
    return [said for n, (old, new) in pairs for said in _fact_differences(f"job.data[{n}].", old, new)]


def tokenizer_differences(facts: Any, now: Mapping[str, Any] | None) -> list[str]:
    """Each fact of the tokenizer that is not as the run's contract has it; none where the contract has none."""
    if not isinstance(facts, Mapping):
        return []
    return _fact_differences("job.tokenizer.", facts, now or {"label": "bytes"})


def _is_content(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(source, Mapping) for source in content)


def _fact_differences(prefix: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    old, new = dict(_flat(before)), dict(_flat(now))
    same = old.keys() & new.keys()
    differ = [f"{prefix}{_said(path, old, new)}" for path in sorted(same) if old[path] != new[path]]
    for path in sorted(old.keys() ^ new.keys()):
        if _is_table(new if path in old else old, path):  # a part that one of them has not, such as a rope_scaling
            differ.append(f"{prefix}{path} was {_presence(old, path)}, now {_presence(new, path)}")
    return differ


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping) and prefix.count(".") < _DEEPEST:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_table(flat: Mapping[str, Any], path: str) -> bool:
    return any(name.startswith(f"{path}.") for name in flat)


def _presence(flat: Mapping[str, Any], path: str) -> str:
    return "there" if _is_table(flat, path) else shown(flat[path])


def listed(differences: list[str]) -> str:
    """The differences in one line; a few of them where there are many."""
    more = len(differences) - _MOST_SHOWN
    return "; ".join(differences[:_MOST_SHOWN]) + (f"; and {more} more" if more > 0 else "")
