"""Differing fields, the groups that must move together, and contributions that add up."""

import pytest
from plans import make

from threefold.compare.attribution import attribute
from threefold.compare.field_groups import PlansBetween, differing_fields, layout_faults
from threefold.plan.plan import Plan
from threefold.rules.all import blockers, judge
from threefold.search.legal import faults


def test_differences_are_found_by_field() -> None:
    found = differing_fields(make(), make(layout_tp=4, knobs_recompute=None))
    assert [(each.path, each.a, each.b) for each in found] == [
        ("knobs.recompute", ("mla_up_proj", "mlp"), None),
        ("layout.tp", 2, 4),
    ]


def test_stages_move_with_the_pipeline() -> None:
    a = make(layout_pp=8, layout_vpp=4, layout_stages="Et|(tt|)*30mL")
    b = make(layout_pp=4, layout_vpp=4, layout_stages="Et*4|(t*4|)*14tmL", knobs_permute_fusion=False)
    between = PlansBetween(a, b, faults)
    together = next(group for group in between.groups if "layout.pp" in group)
    assert "layout.stages" in together
    assert ("knobs.permute_fusion",) in between.groups
    assert all(not blockers(judge(between.plan(frozenset({group})))) for group in between.groups)
    assert between.plan(frozenset(between.groups)).written == b.written


def test_needed_fields_come_along() -> None:
    """Delayed weight gradients need EP overlap: without it a rule refuses the plan."""
    a, b = make(knobs_ep_overlap=None, knobs_delay_wgrad=None), make()
    between = PlansBetween(a, b, faults)
    delayed, both = frozenset({("knobs.delay_wgrad",)}), frozenset({("knobs.delay_wgrad",), ("knobs.ep_overlap",)})
    assert not between.is_legal(delayed)
    assert between.smallest(delayed, both) == both
    assert between.largest(delayed) == frozenset()
    # It can be priced all the same, so that its share is told apart.
    assert len(PlansBetween(a, b, layout_faults).groups) == 2


def price(plan: Plan) -> dict[str, float]:
    """Seconds with an interaction: overlap saves 3 of 10, delayed gradients 2 more with it; TP adds 1."""
    saved = 3.0 * plan.knobs.ep_overlap + 2.0 * (plan.knobs.ep_overlap and plan.knobs.delay_wgrad)
    return {"ep": 10.0 - saved, "tp": 0.5 * plan.layout.tp}


def test_an_interaction_is_shared_by_both_fields() -> None:
    """Shapley values by hand: overlap -3 - 2/2, delayed gradients -2/2, TP from 2 to 4 adds 1."""
    a, b = make(knobs_ep_overlap=None, knobs_delay_wgrad=None), make(layout_tp=4)
    found = attribute(PlansBetween(a, b, layout_faults), price)
    amounts = {path: each.amount for each in found.contributions for path in each.fields}
    assert amounts == pytest.approx({"knobs.ep_overlap": -4.0, "knobs.delay_wgrad": -1.0, "layout.tp": 1.0})
    assert found.is_exact
    assert found.change == pytest.approx(-4.0)
    shares = {path: each.terms for each in found.contributions for path in each.fields}
    assert shares["layout.tp"] == pytest.approx({"ep": 0.0, "tp": 1.0})


INERT = {
    f"job_{name}": value
    for name, value in {
        "lr": 0.1,
        "seed": 3,
        "steps": 7,
        "warmup_steps": 3,
        "weight_decay": 0.2,
        "clip_norm": 2.0,
    }.items()
}


def test_fields_without_effect_cost_no_accuracy() -> None:
    """Ten fields differ, of which all but two do nothing: the sum stays exact."""
    a, b = make(knobs_ep_overlap=None, knobs_delay_wgrad=None), make(job_min_lr=0.2, job_z_loss=0.1, **INERT)
    found = attribute(PlansBetween(a, b, layout_faults), price)
    assert found.is_exact
    assert {path for each in found.contributions if each.amount for path in each.fields} == {
        "knobs.ep_overlap",
        "knobs.delay_wgrad",
    }


def test_drawn_orders_add_up_too() -> None:
    """More groups than all sets are priced for: each has an effect of its own, one pair an interaction."""
    names = ("lr", "seed", "steps", "warmup_steps", "weight_decay", "clip_norm", "z_loss", "min_lr", "bias_rate")
    values = {"lr": 0.1, "seed": 3, "steps": 7, "warmup_steps": 3, "weight_decay": 0.2, "clip_norm": 2.0}
    values |= {"z_loss": 0.1, "min_lr": 0.2, "bias_rate": 0.01}
    a, b = make(), make(**{f"job_{name}": values[name] for name in names})

    def several(plan: Plan) -> dict[str, float]:
        moved = [getattr(plan.job, name) != getattr(a.job, name) for name in names]
        return {
            "x": sum(2.0**place for place, is_moved in enumerate(moved) if is_moved) + 8.0 * (moved[0] and moved[1])
        }

    found = attribute(PlansBetween(a, b, layout_faults), several)
    assert not found.is_exact
    amounts = {path: each.amount for each in found.contributions for path in each.fields}
    assert sum(amounts.values()) == pytest.approx(found.change)
    assert amounts["job.bias_rate"] == pytest.approx(256.0)
    # Each order comes with its reverse, so that the pair's interaction is shared equally.
    assert amounts["job.lr"] == pytest.approx(1.0 + 4.0)
    assert amounts["job.seed"] == pytest.approx(2.0 + 4.0)
    assert attribute(PlansBetween(a, b, layout_faults), several) == found
