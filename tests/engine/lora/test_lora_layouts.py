"""Plans with adapters or frozen weights give one rank's losses, gradients and weights in every layout."""

import pytest
import torch
from lora_layouts import FROZEN_CASES, LORA_CASES
from oracle_layouts import Case

from threefold.engine.build import options_of
from threefold.engine.models.build import build_model
from threefold.engine.verify.oracle import compare_with_one_rank
from threefold.rules.all import check, errors
from threefold.rules.stacks import ENGINE_LIMITS

FP64 = 1e-10  # as in test_oracle.py: sums in another order, divided by AdamW


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def marked(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=() if case.often else pytest.mark.slow)


@pytest.mark.parametrize("case", [marked(case) for case in [*FROZEN_CASES, *LORA_CASES]])
def test_layout_is_one_rank(case: Case) -> None:
    plan = case.plan
    assert [str(f) for f in errors(check(plan)) if f.rule not in ENGINE_LIMITS] == []
    found = compare_with_one_rank(plan)
    assert found.problems == ()
    assert found.near_ties == 0
    assert found.idle == tuple(sorted(frozen_router_biases(plan)))
    model = build_model(plan.model, plan.mtp, device="meta", options=options_of(plan))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert 0 < found.num_parameters == len(trained) < len(list(model.parameters()))
    assert found.largest <= FP64, found


def frozen_router_biases(plan: object) -> list[str]:
    """Biases of routers that do not train stay zero."""
    model = build_model(plan.model, plan.mtp, device="meta", options=options_of(plan))  # type: ignore[attr-defined]
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return [name for name, _ in model.named_buffers() if name.replace("balance_bias", "weight") in frozen]
