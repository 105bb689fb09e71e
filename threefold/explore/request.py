"""What the page may ask for: fields of a plan, checked and bounded before anything is computed.

A request never names a file: models and chips are those of the catalogues, and those that the command line brought.
Limits keep an answer short; each refusal is a finding about its field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from threefold.findings import Finding, FindingsError, did_you_mean, shown
from threefold.plan.parse import Fields, Parsed, parse
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.spec.chip_description import is_file_name
from threefold.spec.chips import ChipSpec
from threefold.spec.model import ModelSpec
from threefold.spec.models import MODELS

MOST_FIELDS, MOST_WORDS, MOST_CHARACTERS = 64, 32, 200
MOST = {
    "cluster.gpus": 65_536,
    "job.seq_len": 2**24,
    "job.global_batch": 2**20,
    "layout.pp": 128,
    "layout.vpp": 64,
}
MOST_LAYERS = 1024
MOST_CHUNKS = 256  # stages times chunks of each
MOST_MICROBATCHES = 16_384
_PREFIXES = ("cluster.", "job.", "layout.", "knobs.")
# Fields without a control: those that name files or parts of a model, and by the beginnings of their names those of the
# job that change neither memory nor time.
_CLOSED = frozenset(("job.data", "job.tokenizer", "job.val_data", "job.freeze"))
_WITHOUT_EFFECT = tuple(
    f"job.{name}"
    for name in (
        *("lr", "min_lr", "seed", "steps", "weight_decay", "adam_", "aux_", "seq_aux", "z_loss", "bias_rate"),
        *("warmup", "decay_", "clip_", "val_", "max_bad", "initial_loss", "loss_scale", "mtp_weight"),
    )
)


def _has_control(path: str) -> bool:
    if path in ("model", "target"):
        return True
    return path.startswith(_PREFIXES) and path not in _CLOSED and not path.startswith(_WITHOUT_EFFECT)


EXPLORED = frozenset(path for path in FIELDS if _has_control(path))


@dataclass(frozen=True, slots=True)
class Started:
    """What the command line brought: fields of a plan, and its model and chip where they come from files."""

    fields: Fields  # that have a control
    model: ModelSpec | None = None
    chip: ChipSpec | None = None
    fixed: Fields = field(default_factory=dict)  # the rest of the plan, which goes with its model

    @classmethod
    def of_plan(cls, plan: Plan) -> "Started":
        written = {path: _plain(value) for path, value in plan.written}
        fields = {path: value for path, value in written.items() if path in EXPLORED and _fits_control(path, value)}
        fields |= {"model": plan.model_name, "target": plan.target, "cluster.chip": plan.cluster.chip}
        own_model = plan.model if plan.model_name.startswith("hf:") else None
        fixed = {path: value for path, value in written.items() if path not in fields}
        return cls(fields, own_model, plan.cluster.own, fixed)

    def completed(self, fields: Fields) -> Fields:
        """Fields of the page with those that have no control, as long as the model is the one that was brought."""
        return {**self.fixed, **fields} if fields.get("model") == self.fields.get("model") else fields


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _fits_control(path: str, value: Any) -> bool:
    """A field that takes a name or a list of names has a control for the name only."""
    return not (isinstance(value, list) and str in FIELDS[path].types)


def checked_fields(raw: Any) -> Fields:
    """The fields of a request. Raises findings for whatever is no field, or no value of a sane size."""
    if not isinstance(raw, Mapping):
        raise FindingsError([_limit("fields", "a request is an object of plan fields")])
    if len(raw) > MOST_FIELDS:
        raise FindingsError([_limit("fields", f"{len(raw)} fields are more than {MOST_FIELDS}")])
    found: Fields = {}
    problems = []
    for path, value in raw.items():
        if path not in EXPLORED:
            advice = did_you_mean(str(path)[:MOST_CHARACTERS], EXPLORED)
            problems.append(
                Finding(rule="unknown-field", at=shown(path), problem="no field of the explorer", advice=advice)
            )
        elif not _is_small(value):
            problems.append(_limit(path, f"{shown(value)} is larger than any value of this field"))
        elif value is not None and value != "":
            found[path] = value
    if problems:
        raise FindingsError(problems)
    return found


def _is_small(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= MOST_WORDS and all(isinstance(each, str) and _is_small(each) for each in value)
    if isinstance(value, str):
        return len(value) <= MOST_CHARACTERS
    return value is None or isinstance(value, bool) or (isinstance(value, int | float) and abs(value) <= 1e12)


def read_request(fields: Fields, started: Started) -> Parsed:
    """The plan of a request. Raises findings where it is past a limit or names a model or chip that is not offered."""
    model, chip = fields.get("model"), fields.get("cluster.chip", "")
    own_model = started.model if model == started.fields.get("model") else None
    own_chip = started.chip if chip == started.fields.get("cluster.chip") else None
    if own_model is None and (not isinstance(model, str) or model not in MODELS):
        advice = did_you_mean(str(model), MODELS) or "choose one of the list"
        raise FindingsError(
            [Finding(rule="known-model", at="model", problem=f"no model named {shown(model)}", advice=advice)]
        )
    if own_chip is None and isinstance(chip, str) and is_file_name(chip):
        problem = "files of chips are for the command line"
        raise FindingsError([Finding(rule="known-value", at="cluster.chip", problem=problem, advice="choose another")])
    parsed = parse(started.completed(fields), model=own_model, own_chip=own_chip)
    if parsed.readable is not None:
        _check_size(parsed.readable)
    return parsed


def _check_size(plan: Plan) -> None:
    """Raise where a plan is too large for an answer at once."""
    layout = plan.layout
    values: dict[str, int] = {
        "cluster.gpus": layout.gpus,
        "job.seq_len": plan.job.seq_len,
        "job.global_batch": plan.job.global_batch,
        "layout.pp": layout.pp,
        "layout.vpp": layout.vpp,
    }
    problems = [
        _limit(path, f"{value} is more than {MOST[path]}", {path: MOST[path]})
        for path, value in values.items()
        if value > MOST[path]
    ]
    if layout.chunks > MOST_CHUNKS:
        problems.append(_limit("layout.vpp", f"PP {layout.pp} x VPP {layout.vpp} is more than {MOST_CHUNKS} chunks"))
    try:
        held = [len(chunk.layers) for chunk in plan.chunks]
    except (FindingsError, ValueError):  # a rule says what is wrong with the stages
        held = []
    if len(held) > MOST_CHUNKS or sum(held) > MOST_LAYERS:
        problems.append(_limit("layout.stages", f"{len(held)} chunks and {sum(held)} layers are too many"))
    if plan.num_microbatches > MOST_MICROBATCHES:
        said = f"{plan.num_microbatches} microbatches a step are more than {MOST_MICROBATCHES}"
        problems.append(_limit("job.global_batch", said))
    if problems:
        raise FindingsError(problems)


def _limit(path: str, problem: str, fix: Mapping[str, Any] | None = None) -> Finding:
    advice = "" if fix else "choose less, or use `threefold check` and `threefold estimate`"
    return Finding(rule="explorer-limits", at=path, problem=problem, fix=fix, advice=advice)
