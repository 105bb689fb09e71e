"""Layouts drawn at random for the oracle: tiny models of every family that the engine trains, on up to eight ranks.

`draw_layout(seed)` draws a model, a layout, a job and knobs from all that a plan can say (`drawn_fields.py`), whether
they go together or not: models that see, adapters and frozen parts among them. Every other draw has a theme, which
brings rare combinations together (`drawn_themes.py`). `resolve(drawn)` asks the rules: the plan as it was drawn, as
repaired by the fixes of the rules, or nothing. `layout_runs.py` runs the plans, `drawn_coverage.py` counts them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drawn_fields import FORMATS, draw_balance, draw_degrees, draw_fields, draw_stages
from drawn_models import DENSE, SEEING, Fields, draw_config, one_in
from drawn_themes import THEMES
from tiny_mixtures import MIXTURES
from tiny_models import FAMILIES

from threefold.cost.cp_exchange import resolve_exchange
from threefold.findings import Finding, FindingsError
from threefold.plan.parse import change, parse
from threefold.plan.plan import Plan
from threefold.rules.all import PREDICTED, errors, judge, promoted, repair
from threefold.rules.stacks import ENGINE_LIMITS
from threefold.spec.hf import model_from_dict

MAX_RANKS = 8
_FAMILIES = (*FAMILIES, *FAMILIES, *MIXTURES, *SEEING, "deepseek_v3", "deepseek_v3", "qwen3_next", "gpt_oss")
_WEIGHTED_THEMES = [name for name, theme in THEMES.items() for _ in range(theme.weight)]
_OBSTACLES = ("recompute_method", "recompute_layers", "activation_offload", "activation_offload_layers")


@dataclass(frozen=True)
class Drawn:
    """One draw: a Hugging Face configuration and the fields of a plan."""

    seed: str
    config: dict[str, Any]
    fields: Fields
    as_trained: bool = False  # in the plan's own format, in place of fp64
    theme: str = ""


@dataclass(frozen=True)
class Resolved:
    """The plan that the rules leave of a draw."""

    plan: Plan | None  # None: refused, also with the fixes that the rules offer
    repaired: tuple[str, ...]  # the rules whose fixes were applied
    refusals: tuple[str, ...]  # the rules that refuse it still


def draw_layout(seed: int | str, families: Sequence[str] = (), as_trained: bool | None = None) -> Drawn:
    """The draw of a seed: of any model in `tiny_models`, `tiny_mixtures` and `tiny_vision`, or of these `families`.

    `as_trained` says whether it is trained in its own format; by default that is drawn too.
    """
    draw = random.Random(f"layout {seed}")
    name = draw.choice(_WEIGHTED_THEMES) if one_in(draw, 2) and not families else ""
    theme = THEMES.get(name)
    if as_trained is None:
        as_trained = bool(theme.formats) if theme else one_in(draw, 3)
    formats = (theme.formats if theme else ()) or FORMATS
    family = draw.choice(families or (theme.families if theme else _FAMILIES))
    layout = theme.draw_layout(draw) if theme else draw_degrees(draw, family in DENSE)
    config, mtp = draw_config(draw, family, layout, as_trained and formats != ("bf16",))
    num_layers = config.get("text_config", config)["num_hidden_layers"]
    fields = draw_fields(draw, layout, num_layers, family in SEEING, formats if as_trained else ())
    if mtp is not None:
        fields["job.mtp"] = mtp
    if theme:
        fields |= {"layout.replicate": None, **layout, **theme.draw_fields(draw)}
    fields |= draw_balance(random.Random(f"balance {seed}"), fields, family in DENSE)
    if layout["layout.pp"] > 1 and one_in(draw, 1 if theme and theme.draws_stages else 3):
        depths = fields.get("job.mtp")
        depths = config.get("num_nextn_predict_layers", 0) if depths is None else depths
        fields["layout.stages"] = draw_stages(draw, fields, num_layers, depths)
    if theme is None and fields.get("knobs.ep_overlap") and draw.random() < 0.8:
        fields |= _without_obstacles(draw, fields)
    written = {path: value for path, value in fields.items() if value is not None}
    return Drawn(str(seed), config, {"model": family, "target": "threefold", **written}, as_trained, name)


def resolve(drawn: Drawn) -> Resolved:
    """Judge a draw as `threefold train` does, and repair it where it is refused."""
    try:
        model = model_from_dict(drawn.config, name=str(drawn.fields["model"]), source="drawn")
        plan = parse(drawn.fields, model=model).plan
    except (FindingsError, ValueError) as error:
        return Resolved(None, (), (type(error).__name__,))
    if plan is None:
        return Resolved(None, (), ("parse",))
    plan, refusals = _judge(plan)
    if not refusals:
        return Resolved(plan, (), ())
    plan, limits = _within_engine_limits(plan, refusals)
    changed, applied = repair(plan, leave_out=PREDICTED)
    changed, left = _judge(changed)
    names = (*limits, *(finding.rule for finding in applied))
    is_legal = not left and 1 < changed.layout.gpus <= MAX_RANKS
    return Resolved(changed if is_legal else None, names, tuple(finding.rule for finding in left))


def _judge(plan: Plan) -> tuple[Plan, list[Finding]]:
    """What refuses a plan. Whether it fits the memory of a GPU is not asked: tiny models do."""
    plan = resolve_exchange(plan)
    return plan, errors(promoted(judge(plan, leave_out=PREDICTED)))


def _within_engine_limits(plan: Plan, refusals: Sequence[Finding]) -> tuple[Plan, tuple[str, ...]]:
    """The plan without what the engine does not have. `repair` leaves these alone, which are warnings to it."""
    limits = [finding for finding in refusals if finding.rule in ENGINE_LIMITS and finding.fix]
    for finding in limits:
        plan = change(plan, finding.fix or {})
    return plan, tuple(finding.rule for finding in limits)


def _without_obstacles(draw: random.Random, fields: Fields) -> Fields:
    """What EP overlap excludes, taken back: the fix of a rule may be to go without the overlap that was drawn."""
    kept = [name for name in fields.get("knobs.recompute") or [] if name not in ("moe", "full")]
    changes: Fields = {f"knobs.{name}": None for name in (*_OBSTACLES, "shared_expert_overlap", "dispatcher")}
    changes |= {"knobs.recompute": kept or None, "knobs.recompute_save": None}
    if fields["layout.pp"] > 1 and fields["layout.vpp"] == 1:
        changes |= {"layout.vpp": 2, "layout.stages": None}
        changes["layout.schedule"] = draw.choice((None, "interleaved", "dualpipev", "zero-bubble"))
    return changes
