"""The failure table of the document on expert-parallel overlap: each row is found, told apart, confirmed and cured.

A row has the plan that fails, the rule that names the cause, the setting that the document has one look at, and what it
has one change.
"""

from pathlib import Path
from typing import Any

import pytest
from plans import CLEAN, build

from threefold.cli.main import main
from threefold.cli.overlap_ab import doubts
from threefold.engine.verify.overlap_ab import VariantSummary
from threefold.findings import Finding
from threefold.plan.parse import change, parse
from threefold.rules.all import check, explain, judge

FLEX_ALONE = {**CLEAN, "knobs.dispatcher": None, "model.moe_token_dispatcher_type": "flex"}
# symptom: (changes to a plan without findings, rule, where to look, what the fix says)
TABLE: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "assert: EP": ({"layout.ep": 1}, "ep-overlap-needs-ep", "expert_model_parallel_size", "layout.ep="),
    "assert: dispatcher": (
        {"knobs.dispatcher": "local"}, "ep-overlap-dispatcher", "moe_token_dispatcher_type", "dispatcher=alltoall",
    ),
    "assert: BF16 or FP16": ({"knobs.precision": "fp32"}, "ep-overlap-base-dtype", "model.bf16", "bf16"),
    "hang": ({"stack.torch": "2.5.1"}, "ep-overlap-torch", "torch.__version__", "2.6.0"),
    "assert: VPP": (
        {"layout.vpp": 1}, "ep-overlap-needs-vpp", "virtual_pipeline_model_parallel_size", "layout.vpp=2",
    ),
    "assert: recompute": (
        {"knobs.recompute": ["full"]}, "ep-overlap-excludes-full-recompute", "recompute_granularity", "knobs.recompute",
    ),
    "assert: EP overlap for delayed weights": (
        {"knobs.ep_overlap": False},
        "delay-wgrad-needs-ep-overlap", "overlap_moe_expert_parallel_comm", "knobs.ep_overlap",
    ),
    "assert: accumulation fusion": (
        {"knobs.graphs": ["attn"], "knobs.grad_accum_fusion": False},
        "delay-wgrad-graph-fusion", "gradient_accumulation_fusion", "knobs.grad_accum_fusion=true",
    ),
    "assert: attention bias": (
        {"model": "gpt-oss-120b", "knobs.graphs": ["attn"]}, "delay-wgrad-graph-bias", "add_qkv_bias", "knobs.graphs",
    ),
    "flex dispatcher, silently skipped": (
        {"cluster.chip": "gb200"}, "dispatcher-supports-chip", "Falling back to alltoall", "hybridep",
    ),
}  # fmt: skip


def of_rule(findings: list[Finding], rule: str) -> list[Finding]:
    return [finding for finding in findings if finding.rule == rule]


def test_without_the_change_nothing_is_wrong() -> None:
    assert judge(build(CLEAN)) == []


@pytest.mark.parametrize("symptom", TABLE)
def test_a_row_is_diagnosed(symptom: str) -> None:
    changes, rule, look, cure = TABLE[symptom]
    plan = build({**CLEAN, **changes})
    [finding] = of_rule(check(plan), rule)
    assert finding.severity == ("warning" if rule == "dispatcher-supports-chip" else "error")  # a gate with a date
    assert cure in finding.fix_text
    said = explain(rule)
    assert said is not None
    assert look in said.confirm
    if finding.fix_data:
        assert not of_rule(check(change(plan, finding.fix_data)), rule)


def test_a_backend_that_nothing_applies() -> None:
    """`no throughput gain from flex dispatcher`: upstream the type without its backend changes nothing."""
    parsed = parse({path: value for path, value in FLEX_ALONE.items() if value is not None})
    [finding] = of_rule(list(parsed.findings), "flex-needs-backend")
    assert parsed.plan is None
    assert "deepep" in finding.fix_text
    both = {**FLEX_ALONE, "model.moe_flex_dispatcher_backend": "hybridep"}
    assert build(both).knobs.dispatcher == "hybridep"


@pytest.mark.parametrize(("pp", "vpp", "count"), [(1, 1, 1), (4, 2, 4), (8, 2, 8)])
def test_passes_without_another_beside_them_are_told(pp: int, vpp: int, count: int) -> None:
    """PP stages are filled with PP microbatches: then there is no forward left for the first backward."""
    layout = {"layout.pp": pp, "layout.vpp": vpp, "layout.tp": 1, "layout.ep": 8, "cluster.gpus": 64}
    plan = build({**CLEAN, **layout, "job.global_batch": count * 64 // pp})
    rule = "ep-overlap-needs-microbatches"
    [finding] = of_rule(check(plan), rule)
    cured = change(plan, finding.fix_data)
    assert cured.num_microbatches == 2 * pp
    assert not of_rule(check(cured), rule)


NAMES = {
    "comm_overlap.overlap_moe_expert_parallel_comm": ("ep_overlap", True),
    "comm_overlap.delay_wgrad_compute": ("delay_wgrad", True),
    "model.moe_shared_expert_overlap": ("shared_expert_overlap", True),
    "model.gradient_accumulation_fusion": ("grad_accum_fusion", False),
    "model.moe_permute_fusion": ("permute_fusion", False),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_documents_names_are_taken(name: str) -> None:
    field, value = NAMES[name]
    fields = {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 8, "job.global_batch": 64}
    assert getattr(build({**fields, name: value}).knobs, field) is value
    assert getattr(build({**fields, name: not value}).knobs, field) is not value


def row(seconds: float, spread: float, exchange: float) -> Any:
    return VariantSummary("", seconds, spread, exchange, 0.0, {})


@pytest.mark.parametrize(
    ("first", "other", "steps", "word"),
    [
        (row(1.0, 0.01, 0.05), row(0.9, 0.01, 0.05), 5, "communication-light: exchanges are 5.0%"),
        (row(1.0, 0.06, 0.40), row(0.9, 0.01, 0.40), 5, "within the spread"),
        (row(1.0, 0.01, 0.40), row(1.1, 0.01, 0.40), 5, "no gain"),
        (row(1.0, 0.00, 0.40), row(0.7, 0.00, 0.40), 1, "one step has no spread"),
        (row(1.0, 0.01, 0.40), row(0.7, 0.01, 0.40), 5, None),
    ],
)
def test_the_ab_doubts_its_gain(first: Any, other: Any, steps: int, word: str | None) -> None:
    said = doubts([first, other], steps)
    assert said == [] if word is None else word in said[0]


def test_the_ab_wants_a_steady_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["overlap-ab", str(tmp_path / "plan.toml"), "--steps", "0"])
    assert stopped.value.code == 2
    assert "0 is below 1" in capsys.readouterr().err
