"""Runs that others measured: their settings must pass our rules, or be impossible for a reason we name."""

import pytest
from repository import ROOT

from threefold.interop.published import cannot_express, is_usable, load_rows, plan_from_row
from threefold.rules.all import check, errors

ROWS = load_rows(ROOT / "data" / "published_runs.json")
USABLE = [row for row in ROWS if is_usable(row)]

# Printed settings that no machine can run: PP 8 x EP 64 needs 512 GPUs, the table says 256.
IMPOSSIBLE = {
    "deepseek-v3-gb200-256-mxfp8-pretrain-25-09-1": "grids-divide-ranks",
    "deepseek-v3-gb300-256-mxfp8-pretrain-25-11-2": "grids-divide-ranks",
}


def test_usable_rows_are_those_of_the_definition() -> None:
    assert len(USABLE) == 94  # as data/README.md defines them
    assert not {row["id"] for row in USABLE} & set(IMPOSSIBLE)


@pytest.mark.parametrize("row", USABLE, ids=lambda row: row["id"])
def test_usable_row_is_a_plan_without_errors(row: dict[str, object]) -> None:
    assert cannot_express(row) is None
    parsed = plan_from_row(row)
    assert parsed.plan is not None, parsed.findings
    assert errors(check(parsed.plan)) == []


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_row_is_refused_with_the_right_rule(name: str) -> None:
    row = next(row for row in ROWS if row["id"] == name)
    plan = plan_from_row(row).plan
    assert plan is not None
    assert [finding.rule for finding in errors(check(plan))] == [IMPOSSIBLE[name]]


def test_every_row_becomes_a_plan_or_says_why_not() -> None:
    for row in ROWS:
        if cannot_express(row) is None:
            assert plan_from_row(row).plan is not None, row["id"]


def test_settings_survive_the_translation() -> None:
    """Hand-read from the table: DeepSeek-V3 on 256 GB300, release 26.08."""
    plan = plan_from_row(USABLE[0]).plan
    assert plan is not None
    assert (plan.layout.pp, plan.layout.vpp, plan.layout.ep, plan.layout.dp, plan.layout.edp) == (2, 8, 32, 128, 4)
    assert (plan.knobs.precision, plan.knobs.dispatcher, plan.knobs.graphs) == (
        "mxfp8",
        "hybridep",
        ("full_iteration",),
    )
    assert (plan.job.capacity_factor, plan.job.capacity_scope, plan.job.mtp) == (1.5, "rank", 1)
    assert (plan.knobs.optimizer_dtype, plan.knobs.grad_dtype, plan.stack.release) == ("bf16", "bf16", "26.08")
