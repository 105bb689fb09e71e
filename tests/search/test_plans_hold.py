"""Plans that hold: what the search returns is what `train` would run, `check` agrees with, and predicted speed is not
left out of."""

import json
from pathlib import Path
from typing import Any

import pytest
from hf_configs import CONFIGS
from plans import CLEAN, build

from threefold.api.searches import with_defaults
from threefold.cli.main import main
from threefold.cost.estimate import estimate, gain
from threefold.cost.memory.threefold.model import ThreefoldMemory
from threefold.findings import Finding, FindingsError
from threefold.plan.parse import change
from threefold.remedies.graph_scopes import engine_scopes
from threefold.rules.all import check, errors, promoted
from threefold.search import impossible
from threefold.search.refine import CHOSEN, DEGREES
from threefold.search.search import Candidate, SearchResult, search
from threefold.search.space import read_draft
from threefold.search.sweep import sweep

REQUESTS: dict[str, dict[str, Any]] = {
    # Blackwell, where graphs pay and our engine records them only beside some settings.
    "qwen3 on b200": {"model": "qwen3-30b-a3b", "cluster.chip": "b200", "cluster.gpus": 64, "job.seq_len": 8192},
    # Long context that fits with everything kept, on a rack.
    "mixtral at length": {"model": "mixtral-8x7b", "cluster.chip": "gb200", "cluster.gpus": 64, "job.seq_len": 131_072},
    # Optimizer states on the host, because no selective recompute suffices.
    "gpt-oss on few": {"model": "gpt-oss-120b", "cluster.chip": "h100", "cluster.gpus": 32, "job.seq_len": 4096},
    "deepseek at length": {"model": "deepseek-v3", "cluster.chip": "h100", "cluster.gpus": 256, "job.seq_len": 131_072},
}


SLOW = ("deepseek at length",)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in REQUESTS]
)
def held(request: pytest.FixtureRequest) -> SearchResult:
    return search(with_defaults({**REQUESTS[request.param], "target": "threefold"})[0], top=3)


def test_train_would_refuse_no_candidate(held: SearchResult) -> None:
    assert held.candidates
    for one in held.candidates:
        assert errors(promoted(check(one.plan))) == []


def test_memory_fits_at_the_top_of_its_band(held: SearchResult) -> None:
    for one in held.candidates:
        assert one.estimate.fits
        assert one.estimate.device_bytes_band[1] <= one.plan.chip.memory_bytes
        assert "peak-near-memory" not in {finding.rule for finding in check(one.plan)}
    best = held.candidates[0].plan
    same = sweep(best, [{"job.micro_batch": best.job.micro_batch}])
    assert same.points[0].verdict == "fits"


def curable(one: Candidate, free: set[str]) -> list[str]:
    """Findings about a candidate that a fix of searched fields would clear without loss of throughput."""
    found = []
    for finding in one.findings:
        fix = finding.fix_data or {}
        if not fix or not set(fix) <= free:
            continue
        try:
            other = change(one.plan, fix)
        except FindingsError:
            continue
        rest = {left.rule for left in check(other)}
        if not errors(promoted(check(other))) and estimate(other).fits and finding.rule not in rest:
            found += [finding.rule] if gain(one.plan, other) >= 0 else []
    return found


def test_check_knows_nothing_better(held: SearchResult) -> None:
    """Degrees are ranked, and a dispatcher is weighed by an A/B, which the answer lists."""
    for one in held.candidates:
        assert one.findings == tuple(check(one.plan, notes=False))
        assert curable(one, set(CHOSEN) - {*DEGREES, "knobs.dispatcher"}) == []
    compared = {path for one in held.comparisons for path in one.trial.changes}
    if curable(held.candidates[0], {"knobs.dispatcher"}):
        assert "knobs.dispatcher" in compared


def test_knobs_that_pay_are_chosen(held: SearchResult) -> None:
    """What is left to try changes numerics, or is a dispatcher that does not win by its band."""
    best = held.candidates[0]
    for trial in held.retune:
        assert not set(trial.changes) <= set(CHOSEN) - {"knobs.dispatcher"}
    if best.plan.knobs.precision == "bf16":
        assert best.plan.knobs.expert_fusion
    scopes = engine_scopes(best.plan, ("attn", "moe_router", "moe_preprocess"))
    if not best.plan.knobs.graphs and scopes and not best.plan.full_recompute:
        graphed = change(best.plan, {"knobs.graphs": list(scopes)})
        assert errors(promoted(check(graphed))) or not estimate(graphed).fits or gain(best.plan, graphed) < 0.002


def test_a_dispatcher_that_is_built_from_source_has_to_win_by_its_band(held: SearchResult) -> None:
    assert {one.plan.knobs.dispatcher for one in held.candidates} == {"alltoall"}


def test_a_dispatcher_needs_a_reason_on_a100() -> None:
    draft = {"model": "qwen3-30b-a3b", "target": "megatron-bridge", "cluster.chip": "a100", "cluster.gpus": 64}
    found = search({**draft, "job.seq_len": 4096, "layout.ep": 8}, top=2)
    assert {one.plan.knobs.dispatcher for one in found.candidates} == {"alltoall"}


def test_a_faster_bf16_is_ranked_before_the_default_format() -> None:
    """In gpt-oss experts have biases, so that our engine would emulate FP8; on H100 Mixtral's FP8 wins."""
    draft: dict[str, Any] = {"target": "threefold", "cluster.chip": "h100", "cluster.gpus": 64, "job.seq_len": 4096}
    draft |= {"stack.measured": ["precision"]}
    mixtral, oss = (search(with_defaults({**draft, "model": m})[0], top=5) for m in ("mixtral-8x7b", "gpt-oss-120b"))
    assert "fp8-blockwise" in {one.plan.knobs.precision for one in mixtral.candidates}
    assert oss.candidates[0].plan.knobs.precision == "bf16"


def test_no_plan_for_a_model_that_the_engine_lacks() -> None:
    draft = {"target": "threefold", "cluster.chip": "h100", "cluster.gpus": 64, "job.seq_len": 4096}
    found = search({**draft, "model": "nemotron-3-super"})
    assert found.candidates == ()
    assert found.finding is not None
    assert "moe_latent_size" in found.finding.problem
    assert found.finding.fix_data == {"target": "megatron-bridge"}


@pytest.mark.parametrize(
    ("config", "target", "fix"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "megatron-bridge", {"target": "threefold"}),
        ({"hidden_act": "gelu"}, "threefold", {"target": "megatron-bridge"}),
        ({"hidden_act": "quick_gelu"}, "megatron-bridge", None),
    ],
)
def test_no_plan_for_a_model_that_a_target_cannot_train(
    config: dict[str, Any], target: str, fix: dict[str, str] | None, tmp_path: Path
) -> None:
    """Another target is the fix where it trains the model; the two lack different parts of configurations."""
    whole = {"model_type": "qwen3_moe", **CONFIGS["qwen3_moe"], **config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    draft = {"model": f"hf:{tmp_path}", "target": target, "cluster.chip": "h100", "cluster.gpus": 8}
    found = search({**draft, "job.seq_len": 512})
    assert found.candidates == ()
    assert found.finding is not None
    assert "stack-runs-family" in found.finding.problem
    assert found.finding.fix_data == fix
    assert fix or "known: " in found.finding.advice
    if fix:
        assert search({**draft, "job.seq_len": 512, **fix}, top=1).candidates


@pytest.mark.parametrize("target", ["megatron-bridge", "threefold"])
def test_a_fixed_knob_that_refuses_every_candidate_is_named(target: str) -> None:
    """Rules about what memory holds refuse a candidate like any other; only predicted bytes are the search's own."""
    draft = {"model": "tiny-qwen3-moe", "target": target, "cluster.chip": "h100", "cluster.gpus": 4}
    found = search({**draft, "knobs.store_param_remainders": True, "knobs.precision": "fp16"})
    assert found.candidates == ()
    assert found.finding is not None
    assert "remainders-need-bf16" in found.finding.problem
    assert found.finding.fix_data == {"knobs.store_param_remainders": None}


def test_the_rule_that_refused_the_last_candidates_is_in_the_finding() -> None:
    draft = {"model": "tiny-qwen3-moe", "target": "threefold", "cluster.gpus": 4, "job.seq_len": 256}
    fault = Finding(rule="some-rule", at="layout.ep", problem="too many", fix={"layout.ep": 2}, advice="fewer")
    found = impossible.finding(read_draft(draft), [fault])
    assert (found.rule, found.at) == ("plan-exists", "layout.ep")
    assert found.problem == "no plan for tiny-qwen3-moe: too many (some-rule)"
    assert found.fix_data == {"layout.ep": 2}


def test_a_model_that_sees_is_planned_with_pictures() -> None:
    draft = {"model": "qwen3-vl-30b-a3b", "target": "threefold", "cluster.chip": "h100", "cluster.gpus": 8}
    assert with_defaults(draft)[0]["job.data"] == "scenes"
    for given in ({"job.data": "my-pictures.jsonl"}, {"job.images": 2.0}):
        assert with_defaults({**draft, **given})[0].get("job.data") == given.get("job.data")
    assert "job.data" not in with_defaults({**draft, "model": "qwen3-30b-a3b"})[0]


def test_the_default_target_is_the_engine_where_it_trains_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    ours = {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 16}
    fields, why = with_defaults(ours)
    assert (fields["target"], why) == ("threefold", "for threefold, because our engine trains qwen3_moe models")
    fields, why = with_defaults({**ours, "model": "nemotron-3-super"})
    assert fields["target"] == "megatron-bridge"
    assert "moe_latent_size" in why
    assert with_defaults({**ours, "target": "megatron-bridge"})[1] == ""
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "default: threefold where our engine trains the model" in " ".join(capsys.readouterr().out.split())


def test_a_draft_has_the_same_default_and_a_next_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    draft = tmp_path / "draft.toml"
    draft.write_text('model = "tiny-qwen3-moe"\ncluster = { chip = "cpu", gpus = 2 }\n[job]\nseq_len = 256\n')
    assert main(["plan", str(draft), "--top", "1", "--out", str(tmp_path / "best.toml")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Planned for threefold, because our engine trains qwen3_moe models")
    assert f"`threefold dry-run {tmp_path / 'best.toml'}`" in out
    assert "1. data parallel only" in out.split("Candidates")[1]


def test_the_next_better_plan_is_better_once_it_fits() -> None:
    draft = {"model": "qwen3-30b-a3b", "target": "threefold", "cluster.chip": "h100", "cluster.gpus": 16}
    better = search({**draft, "job.seq_len": 4096, "knobs.precision": "bf16"}, top=1).next_better
    assert better is not None
    assert better.need_bytes > better.have_bytes
    assert better.cures
    assert all(cure.effect is not None and cure.effect > 0 for cure in better.cures)


@pytest.mark.slow
def test_few_stages_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the search fast: a plan that misfits is given up at its first full stage, most are never estimated."""
    stages, plain = 0, ThreefoldMemory.stage_peaks

    def counted(self: ThreefoldMemory, plan: Any, skew: float) -> Any:
        nonlocal stages
        for peak in plain(self, plan, skew):
            stages += 1
            yield peak

    monkeypatch.setattr(ThreefoldMemory, "stage_peaks", counted)
    found = search({**REQUESTS["deepseek at length"], "target": "threefold", "knobs.precision": "fp8-blockwise"})
    assert found.candidates
    assert stages < 8000  # 16,684 before


def test_scopes_that_our_engine_records() -> None:
    """CLEAN has TP, EP overlap, delayed weight gradients, FP8 and DeepEP."""
    scopes, fields = ("attn", "moe_router", "moe_preprocess"), {**CLEAN, "target": "threefold"}
    assert engine_scopes(build(fields), scopes) == scopes[:2]
    assert engine_scopes(build({**fields, "knobs.dispatcher": "alltoall"}), scopes) == scopes
    assert engine_scopes(build({**fields, "knobs.precision": "nvfp4"}), scopes) == ("moe_router",)
    assert engine_scopes(build({**fields, "knobs.data_parallel": "fsdp"}), scopes) == ()
