"""The generated page of plan fields is current, and complete."""

from repository import ROOT

from threefold.plan.table import FIELDS
from threefold.report.plan_fields import PAGE, megatron_names, plan_fields_page


def test_the_page_is_current() -> None:
    """`threefold schema --markdown > docs/reference/plan-fields.md` writes it."""
    assert (ROOT / PAGE).read_text(encoding="utf-8") == plan_fields_page()


def test_every_field_has_one_row() -> None:
    lines = plan_fields_page().splitlines()
    for path in FIELDS:
        assert sum(line.startswith(f"| `{path}`") for line in lines) == 1


def test_names_are_megatrons() -> None:
    assert megatron_names("layout.ep") == ["model.expert_model_parallel_size"]
    assert "moe_token_dispatcher_type" in megatron_names("knobs.dispatcher")
    assert "recompute_granularity" in megatron_names("knobs.recompute")
    assert megatron_names("run.hang_seconds") == []
