"""Fixes lead somewhere: after one a plan has no finding that it had not before, and repairs end."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from plans import CLEAN, build
from random_plans import random_fields
from repository import ROOT

from threefold.cli.main import main
from threefold.cost.fit import surely_fits
from threefold.findings import Finding, as_overrides
from threefold.plan.file import dump_plan, parse_overrides, read_plan
from threefold.plan.parse import change, parse
from threefold.plan.plan import Plan
from threefold.remedies.for_memory import ways_that_fit, what_would_fit
from threefold.remedies.recompute_sets import by_worth, selective_sets
from threefold.remedies.trial import try_change
from threefold.rules.all import check, errors, judge, repair, with_fixes
from threefold.rules.fixes import ADVISED

MEGATRON = {"target": "megatron-bridge", "cluster.chip": "h100", "job.seq_len": 4096}
LONG = {
    **MEGATRON,
    "model": "qwen3-235b-a22b",
    "cluster.gpus": 256,
    "job.seq_len": 28672,
    "job.global_batch": 256,
    "layout.ep": 16,
    "layout.pp": 8,
    "layout.vpp": 2,
    "knobs.dispatcher": "deepep",
    "knobs.recompute": ["layernorm", "moe"],
}
DENSE = {
    **MEGATRON,
    "model": "llama3-70b",
    "cluster.gpus": 64,
    "job.seq_len": 8192,
    "job.global_batch": 64,
    "layout.tp": 4,
    "layout.pp": 2,
    "knobs.optimizer_offload": 1.0,
}
GB200 = {**MEGATRON, "cluster.chip": "gb200", "model": "qwen3-30b-a3b", "knobs.dispatcher": "hybridep"}


def found(fields: dict[str, Any], rule: str) -> Finding | None:
    return next((finding for finding in check(build(fields)) if finding.rule == rule), None)


def fix_of(fields: dict[str, Any], rule: str) -> dict[str, Any]:
    finding = found(fields, rule)
    assert finding is not None, rule
    return finding.fix_data or {}


def new_findings(plan: Plan, fix: dict[str, Any]) -> list[Finding]:
    known = {(finding.rule, finding.at) for finding in check(plan, notes=False)}
    return [f for f in check(change(plan, fix), notes=False) if (f.rule, f.at) not in known]


def no_fix_brings_a_finding(fields: dict[str, Any]) -> None:
    plan = build(fields)
    for finding in check(plan):
        assert finding.fix or finding.advice, finding
        if not finding.fix:
            continue
        assert not new_findings(plan, dict(finding.fix)), finding
        if finding.severity != "note":
            after = judge(change(plan, finding.fix))
            assert not [f for f in after if (f.rule, f.at, f.problem) == (finding.rule, finding.at, finding.problem)]
        pasted, wrong = parse_overrides(shlex.split(as_overrides(finding.fix)))
        assert not wrong
        assert parse(dict(plan.written), pasted).plan == parse(dict(plan.written), finding.fix).plan


def a_repair_ends(fields: dict[str, Any]) -> None:
    plan = build(fields)
    repaired, applied = repair(plan)
    before = {finding.rule for finding in judge(plan)}
    assert len(applied) <= 2 * len(before)
    for finding in errors(check(repaired)):
        assert not finding.fix
        assert finding.advice, finding


@settings(max_examples=25, deadline=None)
@given(random_fields())
def test_no_fix_brings_a_finding_and_each_can_be_pasted(fields: dict[str, Any]) -> None:
    no_fix_brings_a_finding(fields)


@settings(max_examples=25, deadline=None)
@given(random_fields())
def test_a_repair_ends_without_errors_or_says_what_is_missing(fields: dict[str, Any]) -> None:
    a_repair_ends(fields)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(random_fields())
def test_fixes_of_many_plans_lead_somewhere(fields: dict[str, Any]) -> None:
    no_fix_brings_a_finding(fields)
    a_repair_ends(fields)


def test_context_parallelism_cures_a_plan_full_of_attention() -> None:
    finding = found(LONG, "peak-fits-memory")
    assert finding is not None
    assert finding.fix == {"layout.cp": 8}
    assert "frees" in finding.advice
    assert "most of it attention" in finding.problem


def test_a_dense_model_recomputes_its_mlp() -> None:
    assert fix_of(DENSE, "peak-fits-memory") == {
        "knobs.recompute": ["mlp"]
    }  # norms before its linear layers are part of these


def test_where_no_gpu_at_hand_helps_the_numbers_are_said() -> None:
    fields = {**MEGATRON, "model": "deepseek-v3", "cluster.gpus": 8, "layout.ep": 8, "job.global_batch": 64}
    finding = found(fields, "states-fit-memory")
    assert finding is not None
    assert not finding.fix
    assert "GPUs would hold it (cluster.gpus=" in finding.advice
    overrides = shlex.split(finding.advice.partition("(")[2].partition(")")[0])
    wider = parse(fields, parse_overrides(overrides)[0]).plan
    assert wider is not None
    assert surely_fits(wider)


def test_the_ladder_goes_from_mild_to_harsh() -> None:
    """On a plan with room every rung fits, so that all of them are seen."""
    roomy = {"model": "qwen3-30b-a3b", "cluster.chip": "b300", "cluster.gpus": 64, "layout.ep": 8, "job.seq_len": 8192}
    plan = build({**MEGATRON, **roomy, "job.global_batch": 128})
    cures = list(ways_that_fit(plan))
    assert list(cures[0]) == ["knobs.recompute"]
    offloads = [number for number, cure in enumerate(cures) if "knobs.optimizer_offload" in cure]
    fulls = [number for number, cure in enumerate(cures) if cure.get("knobs.recompute") == ["full"]]
    degrees = [number for number, cure in enumerate(cures) if set(cure) <= {"layout.cp", "layout.ep"}]
    assert degrees[0] < fulls[0] < offloads[0]
    assert all(surely_fits(change(plan, cure)) for cure in cures[:10])
    assert try_change(plan, cures[0], lambda other: ()).price.startswith("frees ")
    assert set(ADVISED) >= {"peak-fits-memory", "peak-near-memory", "memory-wall"}


def test_modules_are_ordered_by_bytes_for_a_second() -> None:
    bytes_kept = {(): 100.0, ("a",): 60.0, ("b",): 90.0, ("c",): 100.0}
    seconds = {(): 1.0, ("a",): 1.4, ("b",): 1.01, ("c",): 1.0}
    assert by_worth(["a", "b", "c"], bytes_kept.__getitem__, seconds.__getitem__) == ["b", "a"]
    assert selective_sets(["b", "a"], is_moe=False)[-1] == ("b", "a")


def test_shorter_sequences_are_named_where_only_they_fit() -> None:
    fields = {"model": "llama3-8b", "cluster.chip": "h100", "cluster.gpus": 1, "target": "threefold"}
    plan = build({**fields, "job.seq_len": 2**20, "knobs.optimizer_dtype": "bf16", "knobs.grad_dtype": "bf16"})
    assert "GPUs would hold it" in what_would_fit(plan) or "sequences of" in what_would_fit(plan)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        # Full iteration with drop-and-pad: the narrow scopes once broke another rule.
        (
            {**GB200, "knobs.graphs": ["full_iteration"], "job.capacity_factor": 1.0, "knobs.dispatcher": "alltoall"},
            "graph-widen-after-stable",
        ),
        # CP that no power of two reaches.
        (
            {**GB200, "cluster.gpus": 72, "job.seq_len": 73728, "job.global_batch": 64, "layout.cp": 18,
             "layout.ep": 4},
            "tp-for-cp-on-rack",
        ),
        (
            {**MEGATRON, "model": "qwen3-30b-a3b", "cluster.chip": "h200", "cluster.gpus": 256, "job.seq_len": 114688,
             "job.global_batch": 256, "layout.cp": 2, "layout.ep": 8, "knobs.recompute": ["layernorm", "moe_act"]},
            "cp-from-shard-target",
        ),
        (
            {**MEGATRON, "model": "qwen3-235b-a22b", "cluster.chip": "h200", "cluster.gpus": 64, "layout.ep": 32,
             "job.global_batch": 512, "layout.pp": 2, "layout.vpp": 2, "knobs.recompute": ["layernorm", "moe_act"]},
            "ep-traffic-hidden-or-inside",
        ),
        ({**CLEAN, "knobs.recompute": ["full"], "knobs.ep_overlap": False, "knobs.delay_wgrad": False},
         "selective-before-full"),
        ({**CLEAN, "layout.ep": 48}, "ep-divides-experts"),
        ({**CLEAN, "cluster.gpus": 1000}, "grids-divide-ranks"),
        ({**CLEAN, "layout.ep": 1}, "ep-overlap-needs-ep"),
    ],
)  # fmt: skip
def test_a_fix_that_is_offered_holds(fields: dict[str, Any], rule: str) -> None:
    plan = build(fields)
    for finding in check(plan, notes=False):
        if finding.rule == rule and finding.fix:
            assert not new_findings(plan, dict(finding.fix)), finding


def test_several_fields_move_together() -> None:
    """A batch that DP does not share out on a pipeline is raised at once to one that also fills the stages."""
    fields = {**MEGATRON, "model": "qwen3-30b-a3b", "cluster.gpus": 16, "layout.ep": 4, "layout.pp": 4}
    fix = fix_of({**fields, "job.global_batch": 1, "knobs.recompute": ["layernorm", "moe_act"]}, "batch-divides-dp")
    assert fix["job.global_batch"] > 4


def test_idle_gpus_are_few_and_more_are_named() -> None:
    finding = found({**CLEAN, "cluster.gpus": 1000}, "grids-divide-ranks")
    assert finding is not None
    assert "cluster.gpus" not in (finding.fix or {}) or (finding.fix or {})["cluster.gpus"] < 1000
    assert "or use 1024 GPUs" in finding.advice


def test_selective_sets_that_do_not_fit_are_not_offered() -> None:
    plan = read_plan(str(ROOT / "recipes" / "qwen3-vl-235b-a22b-4k-64xgb200-bf16-fsdp-bringup.toml")).plan
    assert plan is not None
    finding = next(one for one in check(plan) if one.rule == "selective-before-full")
    assert not finding.fix
    assert "no selective set" in finding.advice


@pytest.mark.parametrize(
    ("chip", "given", "meant"),
    [("h100", "fp8", "fp8-cs"), ("gb200", "fp8", "fp8-cs"), ("gb200", "mxfp", "mxfp8")],
)
def test_a_misspelt_format_becomes_one_that_the_chip_has(chip: str, given: str, meant: str) -> None:
    parsed = parse({**MEGATRON, "model": "qwen3-30b-a3b", "cluster.chip": chip, "knobs.precision": given})
    assert parsed.readable is not None
    found = with_fixes(parsed.readable, [*parsed.findings, *judge(parsed.readable)])
    [finding] = [one for one in found if one.rule == "known-value"]
    assert finding.fix == {"knobs.precision": meant}


@pytest.mark.parametrize(("chip", "backend"), [("h100", "deepep"), ("gb200", "hybridep")])
def test_flex_becomes_the_backend_of_the_chip(chip: str, backend: str) -> None:
    fields = {**MEGATRON, "model": "qwen3-30b-a3b", "cluster.chip": chip, "model.moe_token_dispatcher_type": "flex"}
    fields |= {"cluster.gpus": 8, "layout.ep": 8}  # with EP 1 DeepEP has nowhere to send
    parsed = parse(fields)
    assert parsed.readable is not None
    found = with_fixes(parsed.readable, [*parsed.findings, *judge(parsed.readable)])
    [finding] = [one for one in found if one.rule == "flex-needs-backend"]
    assert finding.fix == {"knobs.dispatcher": backend}


def test_a_guess_at_a_name_is_shown_and_never_applied() -> None:
    fields = {**CLEAN, "knobs.precision": "fp8", "layout.eep": 64, "layout.tp": 3, "knobs.foo": 1}
    parsed = parse(fields)
    assert parsed.readable is not None
    for kinds in (("fix",), ("fix", "suggestion")):
        repaired, applied = repair(parsed.readable, parsed.findings, kinds=kinds)
        assert {"tp-divides-model"} <= {finding.rule for finding in applied}
        assert not {"known-value", "unknown-field"} & {finding.rule for finding in applied}
        assert not errors(judge(repaired))
        assert (repaired.knobs.precision, repaired.layout.ep) == ("bf16", parsed.readable.layout.ep)
    shown = with_fixes(parsed.readable, parsed.findings)
    said = {finding.at: finding for finding in shown if finding.fix}
    assert {one.fix_kind for one in said.values()} == {"did you mean"}
    assert said["layout.eep"].fix == {"layout.eep": None, "layout.ep": 64}


@pytest.mark.parametrize(
    ("fields", "rule", "kind"),
    [
        ({**CLEAN, "layout.ep": 48}, "ep-divides-experts", "fix"),  # it could not run, and trains the same
        ({**CLEAN, "cluster.gpus": 1000}, "grids-divide-ranks", None),
        (DENSE, "peak-fits-memory", "suggestion"),  # it costs time
        ({**LONG, "cluster.gpus": 128, "layout.pp": 4, "job.global_batch": 17}, "batch-divides-dp", "suggestion"),
        ({**MEGATRON, "model": "qwen3-30b-a3b", "knobs.precision": "mxfp8"}, "precision-runs-on-chip", "suggestion"),
    ],
)
def test_a_fix_keeps_what_the_plan_means(fields: dict[str, Any], rule: str, kind: str | None) -> None:
    """A suggestion says what it changes: bytes, time, or a field that decides what is trained."""
    finding = found(fields, rule)
    assert finding is not None
    assert kind is None or finding.fix_kind == kind
    trained = [path for path in finding.fix or {} if path.startswith(("job.", "model", "cluster", "knobs.precision"))]
    if finding.fix_kind == "suggestion":
        assert re.search(r"changes |frees |costs |gains ", finding.advice)
        assert all(path in finding.advice for path in trained)
    else:
        assert not trained


def test_suggestions_are_applied_where_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "fixed.toml"
    plan.write_text(dump_plan(build(DENSE)), encoding="utf-8")
    assert main(["check", str(plan), "--fix", str(out)]) == 1
    assert "recompute" not in out.read_text(encoding="utf-8")
    assert main(["check", str(plan), "--fix=suggestions", "--out", str(out)]) == 0
    assert "applied suggestion: peak-fits-memory: knobs.recompute=mlp (frees " in capsys.readouterr().out
    assert 'recompute = [\n    "mlp",' in out.read_text(encoding="utf-8")
    assert main(["check", str(plan), "--fix=suggestions"]) == 2
    assert main(["check", str(plan), "--out", str(out)]) == 2


def test_fields_that_move_along_are_needed_and_say_why() -> None:
    for fields in (LONG, {**LONG, "layout.pp": 3}, {**CLEAN, "layout.ep": 1}, {**CLEAN, "knobs.ep_overlap": False}):
        plan = build(fields)
        for finding in check(plan):
            said = f"{finding.at} {finding.problem} {finding.advice}"
            for path in finding.fix or {} if finding.severity != "note" and finding.rule not in ADVISED else ():
                assert path in said or path.rpartition(".")[2] in said or finding.at in path, finding


def test_a_plan_at_length_that_fits_is_no_short_baseline() -> None:
    """Also where it fits at the middle of its band, as the planner counts for other stacks."""
    layout = {"layout.cp": 16, "layout.ep": 16, "layout.pp": 4}
    fields = {**MEGATRON, "cluster.chip": "b200", "cluster.gpus": 1024, "model": "qwen3-30b-a3b", **layout}
    assert found({**fields, "job.seq_len": 65536, "job.global_batch": 256}, "short-baseline-at-length") is None
    alone = {**MEGATRON, "model": "qwen3-30b-a3b", "cluster.gpus": 8, "layout.ep": 8, "job.seq_len": 65536}
    assert found({**alone, "job.global_batch": 8}, "short-baseline-at-length") is not None


def test_fixes_that_make_a_plan_readable_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('model = "tiny-qwen3-moe"\nlayout.ep = "auto"\n', encoding="utf-8")
    out = ["--fix=suggestions", "--out", str(tmp_path / "fixed.toml")]
    assert main(["check", str(plan), *out]) == 0
    assert "fixed.toml with 1 fix\n" in capsys.readouterr().out


def test_one_field_is_swept(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-overlap.toml")
    assert main(["sweep", recipe, "--over", "job.micro_batch=1,2", "--over", "layout.ep=8,16"]) == 2
    assert "--over once" in capsys.readouterr().err


def test_advice_without_a_fix_does_not_begin_with_or() -> None:
    finding = found({**MEGATRON, "model": "llama3-70b", "cluster.gpus": 7, "layout.tp": 4}, "grids-divide-ranks")
    assert finding is not None
    assert finding.fix or finding.advice.startswith("use 8 GPUs")


def test_our_engine_is_not_told_two_things_about_fused_accumulation() -> None:
    """With graphs the fusion is off whatever the plan says: the line goes, and no other finding comes."""
    fields = {"model": "moonlight-16b-a3b", "target": "threefold", "cluster.chip": "h200", "cluster.gpus": 16}
    fields |= {"job.global_batch": 64, "layout.ep": 8, "knobs.ep_overlap": True, "knobs.delay_wgrad": True}
    fields |= {"knobs.graphs": ["attn"], "knobs.grad_accum_fusion": False}
    assert fix_of(fields, "delay-wgrad-graph-fusion") == {"knobs.grad_accum_fusion": None}
