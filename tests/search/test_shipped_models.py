"""Every shipped model for both stacks: a plan that holds from the search to its export, or one finding that says why
there is none. `benchmarks/drawn_cases.py shipped` asks in random order, and resumes;
`tests/dryrun/test_shipped_model_rehearsals.py` rehearses the models."""

from typing import Any

import pytest
from shipped_models import CHIPS, CLUSTERS, SHIPPED, answer_to, draft, exported

from threefold.cost.estimate import estimate
from threefold.findings import Finding
from threefold.interop.megatron.export_plan import BRIDGE
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.rules.all import blockers, check, promoted
from threefold.search.legal import untrained
from threefold.search.search import search
from threefold.spec.models import MODELS
from threefold.spec.stacks import TARGETS


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
    assert answer_to(draft(model, target, "h100", 4096))[1] == ""


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
        f"{chip} at {seq_len}": answer_to(draft(model, target, chip, seq_len))[1]
        for chip in CHIPS
        for seq_len in CLUSTERS
    }
    assert {where: problem for where, problem in problems.items() if problem} == {}
