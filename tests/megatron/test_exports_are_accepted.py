"""Megatron's own validation on what we export: recipes, published runs and random plans. `make test-megatron` runs it.

It takes transformers 5.12, which Megatron Bridge 0.6 asks for. Every model is read from a configuration that is
written from its plan, so that families newer than that transformers fail there, and their verdict is "not judged".
"""

import os
from pathlib import Path
from typing import Any

import pytest
from megatron_draws import DRAWN_MODELS, draw_plan, shown
from megatron_exports import published_plans, recipe_plans
from megatron_judges import NEEDS_WHEELS, RELEASES, WITH_LM, disagreements, findings, refusals, verdict

from threefold.interop.megatron.export_plan import BRIDGE, LM, export_plan
from threefold.plan.parse import change
from threefold.plan.table import FIELDS
from threefold.rules.fixes import repair

pytestmark = NEEDS_WHEELS

NEWEST = RELEASES[-1]
PLANS, OLDER_PLANS = 500, 60  # random plans for the newest release, and for each older one
IN_A_TEST = 20
SEED = int(os.environ.get("THREEFOLD_SEED", "0"))


RECIPES = recipe_plans()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_accepted(name: str, release: str, tmp_path: Path) -> None:
    """Or a rule says why not: the newest release takes every recipe whose model it trains."""
    _, blocking, _ = findings(RECIPES[name], release)
    assert disagreements(RECIPES[name], release, tmp_path) == []
    assert not blocking or release != NEWEST or {finding.rule for finding in blocking} == {"bridge-trains-family"}


@pytest.mark.parametrize("release", WITH_LM)
@pytest.mark.parametrize("name", [name for name, plan in RECIPES.items() if plan.model.vision is None])
def test_every_recipe_is_accepted_by_megatron_lm(name: str, release: str, tmp_path: Path) -> None:
    if any(item.field == "model" for item in export_plan(RECIPES[name], LM, release).lost):
        return  # the table says that its shape must be added by hand
    assert disagreements(RECIPES[name], release, tmp_path, LM) == []


ROWS = published_plans()


@pytest.mark.parametrize("name", ROWS)
def test_every_usable_published_run_is_accepted(name: str, tmp_path: Path) -> None:
    assert disagreements(ROWS[name], NEWEST, tmp_path) == []


def drawn(release: str) -> range:
    count = PLANS if release == NEWEST else OLDER_PLANS
    return range(SEED * PLANS, SEED * PLANS + count)


CASES = [(release, first) for release in reversed(RELEASES) for first in drawn(release)[::IN_A_TEST]]


@pytest.mark.parametrize(("release", "first"), CASES)
def test_megatron_refuses_no_plan_that_we_accept(release: str, first: int, tmp_path: Path) -> None:
    """Drawn plans as they are where `check` accepts them, else as `check --fix` leaves them."""
    wrong = {}
    for seed in range(first, min(first + IN_A_TEST, drawn(release).stop)):
        plan, changes = draw_plan(seed)
        plan, blocking, _ = findings(plan, release)
        if blocking:
            plan, _ = repair(plan)
        if found := disagreements(plan, release, tmp_path / str(seed)):
            fixed = " after --fix" if blocking else ""
            wrong[f"seed {seed}{fixed}: {shown(plan.model_name, changes)}"] = found
    assert wrong == {}


_WHOLE = {"knobs.graphs": ["full_iteration"], "knobs.ep_overlap": False, "knobs.delay_wgrad": False}
_STASH = {**_WHOLE, "job.capacity_factor": 1.5, "job.capacity_scope": "rank"}
_STASH |= {"knobs.dispatcher": "hybridep", "knobs.expert_fusion": True}
_DROPS = {**_WHOLE, "job.capacity_factor": 1.0, "knobs.recompute": []}
GRAPHS: dict[str, dict[str, Any]] = {
    "paged stash": _STASH,
    "paged stash, offload of attention": {**_STASH, "knobs.activation_offload": ["core_attn"]},
    "paged stash, offload of experts": {**_STASH, "knobs.activation_offload": ["fused_group_mlp"]},
    "paged stash, offload of layers": {**_STASH, "knobs.activation_offload_layers": 2, "knobs.recompute": []},
    "offload by module": {**_DROPS, "knobs.activation_offload": ["core_attn"]},
    "offload of layers": {**_DROPS, "knobs.activation_offload_layers": 2},
    "offload of the optimizer": {**_DROPS, "knobs.optimizer_offload": 0.5},
    "experts in a graph, offload": {**_DROPS, "knobs.graphs": ["moe"], "knobs.activation_offload": ["core_attn"]},
}


@pytest.mark.parametrize("release", RELEASES[-2:])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_judged_alike(name: str, release: str, tmp_path: Path) -> None:
    """What changed in Megatron Core 0.18: our rules refuse what it refuses, and nothing else."""
    plan = change(RECIPES["qwen3-30b-a3b-4k-16xh100-bf16-no-overlap"], GRAPHS[name])
    judged, blocking, _ = findings(plan, release)
    found = verdict(judged, BRIDGE, release, tmp_path)
    assert bool(blocking) == bool(refusals(found)), (blocking, found)


def test_the_draw_reaches_every_model_and_knob() -> None:
    seen: dict[str, int] = dict.fromkeys([*DRAWN_MODELS, *(path for path in FIELDS if path.startswith("knobs."))], 0)
    for seed in drawn(NEWEST):
        plan, changes = draw_plan(seed)
        for name in {plan.model_name, *changes} & seen.keys():
            seen[name] += 1
    assert min(seen.values()) >= 5, seen
