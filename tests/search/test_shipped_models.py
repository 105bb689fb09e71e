"""Every shipped model for both stacks: a plan that holds from the search to its export, or one finding that says why
there is none. `tests/dryrun/test_shipped_model_rehearsals.py` rehearses them."""

from typing import Any

import pytest

from threefold.api.searches import with_defaults
from threefold.cost.estimate import estimate
from threefold.findings import Finding
from threefold.interop.megatron.bridge_files import export_files
from threefold.interop.megatron.export_plan import BRIDGE, export_plan
from threefold.interop.slurm import Options
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.rules.all import blockers, check, errors, promoted
from threefold.search.legal import untrained
from threefold.search.search import search
from threefold.spec.models import MODELS
from threefold.spec.stacks import TARGETS

SHIPPED = [name for name in MODELS if not name.startswith("tiny-")]
CHIPS = ("a100", "h100", "h200", "b200", "gb200", "gb300")
CLUSTERS = {4096: 64, 32_768: 128, 131_072: 256}  # GPUs by tokens of a sequence


def draft(model: str, target: str, chip: str, seq_len: int) -> dict[str, Any]:
    cluster = {"cluster.chip": chip, "cluster.gpus": CLUSTERS[seq_len]}
    return {"model": model, "target": target, "job.seq_len": seq_len, **cluster}


def problem_with(fields: dict[str, Any]) -> str:
    """What is wrong with the answer to a draft; empty where there is nothing."""
    found = search(with_defaults(fields)[0], top=1)
    if not found.candidates:
        reason = found.finding
        is_reason = reason is not None and reason.rule == "plan-exists" and bool(reason.fix or reason.advice)
        return "" if is_reason else f"neither a plan nor a reason: {reason}"
    plan = found.best
    refused = errors(promoted(check(plan, notes=False)))
    if refused:
        return f"refused by {refused[0].rule}"
    if not estimate(plan).fits:
        return "does not fit"
    return "" if fields["target"] != BRIDGE or exported(plan) else "exports nothing"


def exported(plan: Plan) -> dict[str, str]:
    return export_files(export_plan(plan, BRIDGE, None), "plan.toml", Options(), ".")


def plain_plan(fields: dict[str, Any]) -> tuple[Plan, list[Finding]]:
    """The draft as a plan without any parallelism but that of data and experts."""
    experts = MODELS[fields["model"]].num_experts
    ep = next((degree for degree in (8, 4, 2) if experts and experts % degree == 0), 1)
    parsed = parse({**fields, "layout.ep": ep})
    assert parsed.plan is not None, parsed.findings
    return parsed.plan, check(parsed.plan)


@pytest.mark.parametrize("target", TARGETS)
def test_every_model_is_judged_priced_and_exported(target: str) -> None:
    for model in MODELS:
        plan, findings = plain_plan(draft(model, target, "h100", 4096))
        guess = estimate(plan)
        assert guess.memory.device_bytes > 0, model
        assert guess.time.step_seconds > 0, model
        if target == BRIDGE and not blockers(promoted(findings)):
            assert exported(plan)["overrides.txt"], model


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", ["olmoe-1b-7b", "granite-3.1-1b-a400m", "gpt-oss-20b"])
def test_some_models_have_a_plan_or_a_reason(model: str, target: str) -> None:
    assert problem_with(draft(model, target, "h100", 4096)) == ""


def test_a_model_that_a_stack_does_not_train_is_told_without_a_search() -> None:
    """Whatever stacks train today: a refusal of the family costs no search, and no model ends in anything else."""
    for model in MODELS:
        for target in TARGETS:
            fields = draft(model, target, "h100", 4096)
            plan = parse(fields).plan
            assert plan is not None
            if untrained(plan):
                found = search(fields, top=1)
                assert found.searched == 0
                assert found.finding is not None


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", SHIPPED)
def test_every_model_has_a_plan_or_a_reason(model: str, target: str) -> None:
    problems = {
        f"{chip} at {seq_len}": problem_with(draft(model, target, chip, seq_len))
        for chip in CHIPS
        for seq_len in CLUSTERS
    }
    assert {where: problem for where, problem in problems.items() if problem} == {}
