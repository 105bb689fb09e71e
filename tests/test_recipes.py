"""Shipped plans: each passes its own check, and its name says what it is."""

import re
from pathlib import Path

import pytest
from repository import ROOT

from threefold.cost.cp_exchange import resolve_exchange
from threefold.cost.estimate import estimate
from threefold.plan.file import read_plan
from threefold.plan.plan import Plan
from threefold.rules.all import check, errors, promoted
from threefold.units import GIB, format_tokens

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))

# What the documents ask for: layout by recipe name.
DOCUMENTED = {
    "deepseek-v3-128k-256xh100-fp8": {"tp": 1, "cp": 32, "ep": 32, "pp": 8, "vpp": 4, "dp": 1, "edp": 1},
    "deepseek-v3-256k-512xh100-fp8": {"tp": 1, "cp": 64, "ep": 32, "pp": 8, "vpp": 4, "edp": 2},
    "qwen3-235b-a22b-128k-128xgb200-bf16": {"tp": 4, "cp": 4, "ep": 32, "pp": 4, "vpp": 12},
    "deepseek-v3-4k-1024xh100-fp8": {"tp": 2, "pp": 8, "vpp": 4, "ep": 64},
    "deepseek-v3-4k-256xgb200-mxfp8": {"tp": 1, "pp": 4, "vpp": 4, "ep": 64},
    "qwen3-30b-a3b-4k-16xh100-bf16-overlap": {"tp": 1, "pp": 1, "ep": 16},
    "qwen3-30b-a3b-4k-16xh100-bf16-hybridep": {"tp": 1, "pp": 1, "ep": 16},
    "qwen3-235b-a22b-4k-256xh100-bf16": {"tp": 2, "pp": 8, "vpp": 4, "ep": 32},
    "glm-5.2-128k-192xgb200-bf16-sft": {"tp": 1, "cp": 32, "pp": 6, "ep": 32},
    "glm-5.2-200000-608xh100-bf16-sft": {"tp": 1, "cp": 32, "pp": 19, "ep": 32},
    "qwen3-next-80b-a3b-64k-32xgb200-bf16-tp2-cp4": {"tp": 2, "cp": 4},
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_passes_and_is_named_after_itself(path: Path) -> None:
    parsed = read_plan(str(path))
    assert parsed.plan is not None, parsed.findings
    assert errors(check(parsed.plan)) == []
    plan = parsed.plan
    context = format_tokens(plan.job.seq_len).lower()
    precision = "fp8" if plan.knobs.precision.startswith("fp8") else plan.knobs.precision
    name = f"{plan.model_name}-{context}-{plan.cluster.gpus}x{plan.cluster.chip}-{precision}"
    assert re.fullmatch(re.escape(name) + r"(-[a-z0-9-]+)?", path.stem)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_recipe_has_the_documented_layout(name: str) -> None:
    plan = read_plan(str(RECIPES[0].parent / f"{name}.toml")).plan
    assert plan is not None
    assert {axis: getattr(plan.layout, axis) for axis in DOCUMENTED[name]} == DOCUMENTED[name]


def test_the_overlap_arms_differ_in_the_overlap_only() -> None:
    arms = []
    for arm in ("no-overlap", "overlap", "overlap-wgrad"):
        plan = read_plan(str(RECIPES[0].parent / f"qwen3-30b-a3b-4k-16xh100-bf16-{arm}.toml")).plan
        assert plan is not None
        arms.append({p: v for p, v in plan.written if p not in ("knobs.ep_overlap", "knobs.delay_wgrad")})
    assert arms[0] == arms[1] == arms[2]


def plan_for_our_engine(path: Path) -> Plan:
    """The recipe for our engine: a variant beside it, or the recipe itself for that target."""
    variant = path.with_name(f"{path.stem}-threefold.toml")
    parsed = read_plan(str(variant)) if variant.exists() else read_plan(str(path), ['target="threefold"'])
    assert parsed.plan is not None, parsed.findings
    return resolve_exchange(parsed.plan)


# Our engine runs the sparse attention of GLM-5.2 on whole sequences only: its recipes are Megatron Bridge's.
FOR_BRIDGE = ("-vl-", "glm-5.2-")
TEXT_RECIPES = [
    path for path in RECIPES if not path.stem.endswith("-threefold") and not any(w in path.stem for w in FOR_BRIDGE)
]


@pytest.mark.parametrize("path", TEXT_RECIPES, ids=lambda path: path.stem)
def test_recipe_is_predicted_to_fit_in_our_engine(path: Path) -> None:
    plan = plan_for_our_engine(path)
    assert errors(check(plan)) == []
    assert estimate(plan).memory.device_bytes <= plan.chip.memory_bytes


@pytest.mark.parametrize("path", [path for path in RECIPES if path.stem.endswith("-threefold")], ids=lambda p: p.stem)
def test_variant_changes_knobs_only_and_is_needed(path: Path) -> None:
    original = path.with_name(path.stem.removesuffix("-threefold") + ".toml")
    plan, other = plan_for_our_engine(path), read_plan(str(original), ['target="threefold"']).plan
    assert other is not None
    assert (plan.job, plan.layout, plan.cluster) == (other.job, other.layout, other.cluster)
    assert not estimate(other).fits
    assert errors(promoted(check(plan))) == []  # what `train` refuses, too


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "most_attention"), [(1, 12), (7, 12)])
def test_deepseek_at_128k_rehearses_within_memory(stage: int, most_attention: int) -> None:
    """Stage 1 holds most of attention, stage 7 most of all."""
    from threefold.dryrun.memory_fit import memory_findings
    from threefold.dryrun.rehearse_rank import rehearse_rank

    plan = plan_for_our_engine(RECIPES[0].parent / "deepseek-v3-128k-256xh100-fp8.toml")
    found = rehearse_rank(plan, rank=stage * plan.layout.gpus // plan.layout.pp)
    assert found.terms["attention"] <= most_attention * GIB
    assert list(memory_findings(plan, found)) == []
